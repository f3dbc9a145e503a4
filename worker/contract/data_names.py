"""Which entries of ``data.train`` and ``data.eval`` may be names of the hub, for those who check and those who read."""

import re

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+){0,2}")
_FILE_ENDINGS = (".jsonl", ".ndjson", ".json", ".csv", ".parquet", ".txt", ".md", ".gz", ".zst")


def is_hub_name(entry: str) -> bool:
    """Whether ``entry``, no file here, can be ``owner/name``, with ``:split`` or ``:subset:split`` after it."""
    is_path = entry.startswith((".", "/", "~")) or entry.lower().endswith(_FILE_ENDINGS)
    return not is_path and _HUB_NAME.fullmatch(entry) is not None
