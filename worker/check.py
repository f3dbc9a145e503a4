"""What only torch and the tokenizer can tell before a run: ``python -m worker.check``, config.yaml on stdin.

Answers with one CheckReport as a line of JSON. Loads no weights, asks nothing of the hub, needs no GPU, leaves nothing.
"""

import os
import sys
from pathlib import Path
from typing import Any

import transformers
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
    model, of_model = look_at_model(config, tokenizer, base)
    errors = [one.message for one in of_model if one.level == "error"]
    found = [one for one in found if not any(error in one.message for error in errors)]  # it reads config.json too
    return CheckReport(found=(*found, *data.found, *of_model), data=data.look, model=model)


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
