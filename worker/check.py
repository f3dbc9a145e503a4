"""What only torch and the tokenizer can tell before a run: ``python -m worker.check``, config.yaml on stdin.

Answers with one CheckReport as a line of JSON. Loads no weights, asks nothing of the hub, needs no GPU, leaves nothing.
"""

import os
import sys
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.constants import HF_HUB_CACHE
from pydantic import ValidationError

from worker.check_data import DataFindings, look_at_data
from worker.check_model import found_of, look_at_model
from worker.contract.check_report import CheckReport, DataLook, Found
from worker.contract.config import Config
from worker.contract.files import encode
from worker.contract.yaml_file import YamlError, parse_yaml
from worker.models import ModelError, build_tokenizer


def main() -> int:
    """Read a resolved configuration, print what is found."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        config = Config.model_validate(parse_yaml(sys.stdin.read()))
    except (YamlError, ValidationError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 2
    print(encode(look(config, Path.cwd()).model_dump(mode="json")), flush=True)
    return 0


def look(config: Config, base: Path) -> CheckReport:
    """What is wrong or odd about model and data of ``config``; relative paths are taken from ``base``."""
    if config.training.entrypoint is not None:
        why = "your own script builds model and data"
        return CheckReport(found=(Found(level="not checked", key="training.entrypoint", message=why),))
    found: list[Found] = []
    tokenizer = _tokenizer(config, base, found)
    data = DataFindings(DataLook(), [])
    if tokenizer is not None:
        data = look_at_data(config, tokenizer, base)
    lengths = [one.lengths.longest for one in (data.look.train, data.look.eval) if one and one.lengths]
    model, of_model = look_at_model(config, tokenizer, base, max(lengths, default=0))
    errors = [one.message for one in of_model if one.level == "error"]
    found = [one for one in found if not any(error in one.message for error in errors)]  # it reads config.json too
    found += _unlikely_names(config, base)
    return CheckReport(found=(*found, *data.found, *of_model), data=data.look, model=model)


def _unlikely_names(config: Config, base: Path) -> Iterator[Found]:
    """Words for model and tokenizer that are no folder here, and of the hub only if nobody has fetched them yet."""
    for key, name in {"model.path": config.model.path, "data.tokenizer": config.data.tokenizer}.items():
        if not name or "/" in name or name == "bytes" or (base / name).is_dir():
            continue
        if (Path(HF_HUB_CACHE) / f"models--{name}").is_dir():
            continue
        near = get_close_matches(name, _folders(base), 1)
        yield Found(
            level="warning",
            key=key,
            message=f"{name!r} is taken for a name of the hub",
            evidence=f"{base} has no folder {name!r}, and the hub's cache here has no model of that name",
            mend=f"did you mean ./{near[0]}?" if near else "if it is a folder, write where it is, with a / in it",
        )


def _folders(base: Path) -> list[str]:
    """Names of the folders in ``base``; none where it may not be read."""
    try:
        return [path.name for path in base.iterdir() if path.is_dir()]
    except OSError:
        return []


def _tokenizer(config: Config, base: Path, found: list[Found]) -> Any:
    wanted = config.data.tokenizer or config.model.path or ""
    key = "data.tokenizer" if config.data.tokenizer else "model.path"
    try:
        return build_tokenizer(config, base)
    except ModelError as error:
        if wanted == "bytes" or (base / Path(wanted).expanduser()).is_dir():
            found.append(found_of(error, "name a folder with a tokenizer in data.tokenizer"))
        else:
            why = f"{wanted} is not on this machine, so neither tokens nor vocabulary are known"
            found.append(Found(level="not checked", key=key, message=why))
        return None


if __name__ == "__main__":
    sys.exit(main())
