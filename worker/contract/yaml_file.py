"""The one YAML reader and writer: PyYAML's safe loader under the core rules of YAML 1.2.

``5e-5`` is a number, ``04:00:00``, ``on`` and ``no`` are text, a key given twice is an error.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from worker.contract.files import UnusableFileError, read_data

_MOST_VALUES = 1_000_000
_BREAKS = frozenset("\x85\u2028\u2029")
_FLOAT = re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$")
_INT = re.compile(r"^[-+]?[0-9]+$|^0o[0-7]+$|^0x[0-9a-fA-F]+$")
_BOOL = re.compile(r"^(true|True|TRUE|false|False|FALSE)$")
_NULL = re.compile(r"^(~|null|Null|NULL|)$")
_RULES: list[tuple[str, re.Pattern[str], str]] = [
    ("null", _NULL, "~nN\0"),
    ("bool", _BOOL, "tTfF"),
    ("int", _INT, "-+0123456789"),
    ("float", _FLOAT, "-+.0123456789"),
]


class YamlError(Exception):
    """Text that is no YAML of ours; the message says where and why, in one line."""


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's own protocol)


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    """PyYAML folds what Unicode calls a line break, and does not get it back; quoted twice it is escaped."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if _BREAKS & set(text) else None)


_Dumper.add_representer(str, _represent_text)

for _tag, _pattern, _first in _RULES:
    for _side in (_Loader, _Dumper):
        _side.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _pattern, ["" if c == "\0" else c for c in _first])


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = str(node.value)
    for prefix, base in (("0o", 8), ("0x", 16)):
        if text.startswith(prefix):
            return int(text[2:], base)
    return int(text)


def _construct_float(loader: _Loader, node: yaml.ScalarNode) -> float:
    return float(str(node.value).lower().replace(".inf", "inf").replace(".nan", "nan"))


def _construct_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise YamlError(f"line {key_node.start_mark.line + 1}: the key {key!r} is not text")
        if key in seen:
            raise YamlError(f"line {key_node.start_mark.line + 1}: the key {key!r} is given twice")
        seen.add(key)
    return dict(loader.construct_mapping(node, deep=True))


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _construct_float)
_Loader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)


def _load(text: str) -> Any:
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _written_out(node, {}) > _MOST_VALUES:
            raise YamlError("its aliases (*name) stand for more values than any configuration has")
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _written_out(node: yaml.Node, known: dict[int, int]) -> int:
    """How many values a node holds when each alias in it is written out: ten lines can stand for billions."""
    if id(node) not in known:
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        children = node.value if isinstance(node, yaml.SequenceNode) else [child for pair in pairs for child in pair]
        known[id(node)] = 1 + sum(_written_out(child, known) for child in children)
    return known[id(node)]


def parse_yaml(text: str) -> Any:
    """The value that ``text`` holds; YamlError where it holds none."""
    try:
        return _load(text)
    except yaml.MarkedYAMLError as error:
        where = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise YamlError(f"{where}{' '.join(str(error.problem).split())}") from None
    except yaml.YAMLError as error:
        raise YamlError(" ".join(str(error).split())) from None
    except (ValueError, KeyError) as error:  # a tag that does not fit its value, an endless number
        raise YamlError(f"a value is not what its tag or form says ({error})") from None
    except RecursionError:
        raise YamlError("it is nested too deeply") from None


def read_yaml(path: Path) -> Any:
    """The value in a YAML file; YamlError where it cannot be read as one."""
    try:
        text = read_data(path).decode()
    except UnusableFileError as error:
        raise YamlError(f"it cannot be read ({error.why.partition(';')[0]})") from None
    except UnicodeDecodeError:
        raise YamlError("it is not UTF-8 text") from None
    except OSError as error:
        raise YamlError(f"it cannot be read ({error.strerror})") from None
    return parse_yaml(text)


def format_yaml(value: Any) -> str:
    """YAML text that ``parse_yaml`` reads back as the same value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
