"""What a run needs of the hub, fetched where the hub can be reached: ``python -m worker.fetch``, config.yaml on stdin.

Afterwards the worker finds all of it in the cache of the hub's library and needs no network. Prints a line for each.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from pydantic import ValidationError

from worker.contract.config import Config
from worker.contract.yaml_file import YamlError, parse_yaml
from worker.documents import DataError, find_files
from worker.rows import BadFileError, rows_of_hub

_WITHOUT_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.ot")
_OTHER_WEIGHTS = _WITHOUT_WEIGHTS[1:]


class FetchError(Exception):
    """Something that the hub does not give; one line that names the key."""


def main() -> int:
    """Read a resolved configuration, fetch what it names."""
    try:
        config = Config.model_validate(parse_yaml(sys.stdin.read()))
        for what in fetch(config, Path.cwd()):
            print(f"fetched {what}", flush=True)
    except (YamlError, ValidationError, DataError, FetchError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 2
    return 0


def fetch(config: Config, base: Path) -> Iterator[str]:
    """Fetch model, tokenizer and data that are names of the hub; says what each is. FetchError: it is not to be had."""
    path, tokenizer = config.model.path, config.data.tokenizer
    if path is not None and _is_of_hub(path, base):
        folder = _snapshot("model.path", path, config.model.revision, _OTHER_WEIGHTS)
        if not any(Path(folder).glob("*.safetensors")):
            _snapshot("model.path", path, config.model.revision, ("*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.ot"))
        yield f"the model {path}"
    if tokenizer not in (None, "bytes", path) and _is_of_hub(str(tokenizer), base):
        _snapshot("data.tokenizer", str(tokenizer), None, _WITHOUT_WEIGHTS)
        yield f"the tokenizer {tokenizer}"
    for key, wanted in (("train", config.data.train), ("eval", config.data.eval)):
        entries = (wanted,) if isinstance(wanted, str) else wanted or ()
        for name in find_files(key, entries, base):
            if isinstance(name, str):
                _data_set(key, name)
                yield f"the data set {name}"


def _is_of_hub(name: str, base: Path) -> bool:
    return not (base / Path(name).expanduser()).is_dir()


def _snapshot(key: str, name: str, revision: str | None, without: tuple[str, ...]) -> str:
    try:
        return snapshot_download(name, revision=revision, ignore_patterns=[*without, "original/*"])
    except (OSError, ValueError, HfHubHTTPError) as error:
        said = " ".join(str(error).split())
        raise FetchError(f"{key}: the hub does not give {name} ({type(error).__name__}: {said:.300})") from None


def _data_set(key: str, name: str) -> None:
    try:
        next(iter(rows_of_hub(name)), None)
    except BadFileError as error:
        raise FetchError(f"data.{key}: {name} {error}") from None


if __name__ == "__main__":
    sys.exit(main())
