"""docs/configuration.md from the models: ``python -m supervisor.config_page > docs/configuration.md``."""

import ast
import inspect
import re
from collections.abc import Iterator
from typing import Any

from supervisor.config_findings import show
from worker.contract import config as models
from worker.contract.owned_fields import OWNED_FIELDS
from worker.contract.section import Section

_HEAD = """\
# Every key of a configuration

Made from the models by `python -m supervisor.config_page > docs/configuration.md`; a test holds it to them. What a
run was started with, every default written out, is its `config.yaml`. How keys go together and which of them must be
given is in [contracts.md](contracts.md#configuration); commented examples are in `configs/`.
"""
_EXTRA = """\
## Below `training.extra`

Any field of transformers.TrainingArguments, but for these: they have a key of their own, or would break what a resume
promises. They are refused by name, with what to do instead.

| field | instead |
|---|---|
"""
_SITE = "Slurm's option of the same name; null: what the site says"


def page() -> str:
    """The whole page: a table for each section, and the fields that ``training.extra`` may not set."""
    schema = models.Config.model_json_schema()
    tables = list(_sections(schema, schema, ""))
    refused = "".join(f"| `{name}` | {_cell(instead)} |\n" for name, instead in sorted(OWNED_FIELDS.items()))
    return "\n".join([_HEAD, *tables, _EXTRA + refused])


def _sections(whole: dict[str, Any], section: dict[str, Any], at: str) -> Iterator[str]:
    """The table of ``section``, which stands at the dotted key ``at``, and after it those of the sections in it."""
    told = _told(section["title"])
    rows, below = [], []
    for name, field in section["properties"].items():
        inner, is_list = _inner(whole, field)
        key = f"{at}{name}"
        if inner is None or is_list:
            rows.append(
                f"| `{key}` | {_kind(field)} | {_default(section, name, field)} | {_cell(told.get(name, _SITE))} |"
            )
        if inner is not None:
            below += list(_sections(whole, inner, f"{key}."))
    if rows:
        about = f"{_cell(told[''])}\n\n" if at else ""
        head = "| key | type | default | meaning |\n|---|---|---|---|\n"
        yield f"## {at.removesuffix('.') or 'At the top'}\n\n{about}{head}" + "\n".join(rows) + "\n"
    yield from below


def _inner(whole: dict[str, Any], field: dict[str, Any]) -> tuple[dict[str, Any] | None, bool]:
    """The section behind a field, None where it is a value; and whether it is a list of such sections."""
    ways = [field, *field.get("anyOf", [])]
    names = {way["$ref"]: False for way in ways if "$ref" in way}
    names |= {way["items"]["$ref"]: True for way in ways if "$ref" in way.get("items", {})}
    for name, is_list in names.items():
        return whole["$defs"][name.rpartition("/")[2]], is_list
    return None, False


def _model(name: str) -> type[Section]:
    return {section.__name__: section for section in Section.__subclasses__()}[name]


def _told(name: str) -> dict[str, str]:
    """The docstrings of a section's fields by name, and under the empty name its own."""
    (found,) = ast.parse(inspect.getsource(_model(name))).body
    assert isinstance(found, ast.ClassDef)
    told = {"": ast.get_docstring(found) or ""}
    for field, after in zip(found.body, found.body[1:], strict=False):
        is_told = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_told:
            told[field.target.id] = inspect.cleandoc(str(after.value.value))  # type: ignore[attr-defined]
    return told


def _kind(field: dict[str, Any]) -> str:
    ways = [way for way in field.get("anyOf", [field]) if way.get("type") != "null"]
    kinds = dict.fromkeys(_one_kind(way) for way in ways)
    return " or ".join([*kinds, *(["null"] if {"type": "null"} in field.get("anyOf", []) else [])])


def _one_kind(way: dict[str, Any]) -> str:
    if "enum" in way:
        return ", ".join(f"`{one}`" for one in way["enum"])
    if "const" in way:
        return f"`{way['const']}`"
    words = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false"}
    word = {**words, "object": "keys below it", "array": "list"}[way["type"]]
    limits = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
    return ", ".join([word, *(f"{said} {way[name]:.16g}" for name, said in limits.items() if name in way)])


def _default(section: dict[str, Any], name: str, field: dict[str, Any]) -> str:
    if name in section.get("required", []):
        return "to be given"
    model = _model(section["title"])
    value = field.get("default", model.model_fields[name].get_default(call_default_factory=True))
    return f"`{show(list(value) if isinstance(value, tuple) else value)}`"


def _cell(text: str) -> str:
    return " ".join(text.replace("``", "`").split()).replace("|", r"\|")


if __name__ == "__main__":
    print(re.sub(r" +\n", "\n", page()), end="")
