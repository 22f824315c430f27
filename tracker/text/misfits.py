"""Explain in plain words why TOML data does not fit the class for the keys."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import inspect

from groupbench.tracker.text.wording import suggestion

_PATH = re.compile(r" - at `\$(.*)`$")
_STEP = re.compile(r"\.(\w+)|\[(\d+|\.\.\.)\]")

_WORDS: tuple[tuple[type[inspect.Type], str], ...] = (
    (inspect.BoolType, "true or false"),
    (inspect.IntType, "a whole number"),
    (inspect.FloatType, "a number"),
    (inspect.StrType, "text in quotes"),
)


def explain(error: msgspec.ValidationError, data: Mapping[str, Any], kind: type[msgspec.Struct]) -> str:
    """Return the reason why msgspec could not convert `data` to `kind`: the key, and the values that it accepts."""
    path = _PATH.search(str(error))
    value: Any = data
    wanted: inspect.Type = inspect.type_info(kind)
    name = ""
    for step in _STEP.finditer(path[1]) if path else ():
        value, wanted, name = _follow(value, wanted, name, step)
    if isinstance(wanted, inspect.StructType) and isinstance(value, Mapping):
        return f"{name}: {_keys(value, wanted)}" if name else _keys(value, wanted)
    return f"{name} = {_toml(value)}: expected {_words(wanted, name)}"


def _follow(value: Any, wanted: inspect.Type, name: str, step: re.Match[str]) -> tuple[Any, inspect.Type, str]:
    """Return the value, the type and the name one step below. Tables and items of a list are counted from 1."""
    if isinstance(wanted, inspect.StructType):
        field = next(field for field in wanted.fields if field.encode_name == step[1])
        below = f"{name}: {step[1]}" if name.startswith("[[") else f"{name}.{step[1]}" if name else step[1]
        return value[step[1]], _plain(field.type), below
    if isinstance(wanted, inspect.DictType):  # the path does not have the key
        key = next(key for key, each in value.items() if not isinstance(each, str))
        return value[key], wanted.value_type, f"{name}.{key}"
    assert isinstance(wanted, inspect.VarTupleType)
    number = int(step[2])
    is_table = isinstance(wanted.item_type, inspect.StructType)
    return value[number], wanted.item_type, f"[[{name}]] {number + 1}" if is_table else f"{name}, item {number + 1}"


def _plain(wanted: inspect.Type) -> inspect.Type:
    """Return a type without `None`, which TOML does not have."""
    if isinstance(wanted, inspect.UnionType):
        others = [each for each in wanted.types if not isinstance(each, inspect.NoneType)]
        return others[0] if len(others) == 1 else inspect.UnionType(tuple(others))
    return wanted


def _keys(table: Mapping[str, Any], wanted: inspect.StructType) -> str:
    """Return the key that a table has too many, or too few."""
    accepted = [field.encode_name for field in wanted.fields]
    unknown = next((key for key in table if key not in accepted), None)
    if unknown is None:
        return next(
            f"the key {field.encode_name!r} is missing"
            for field in wanted.fields
            if field.required and field.encode_name not in table
        )
    return f"unknown key {unknown!r}{suggestion(unknown, accepted)}; accepted: {', '.join(accepted)}"


def _words(wanted: inspect.Type, name: str = "NAME") -> str:
    """Return a type in words. `name` is that of the key."""
    if isinstance(wanted, inspect.Metadata):
        return str((wanted.extra_json_schema or {})["description"])
    if isinstance(wanted, inspect.LiteralType):
        return "one of " + ", ".join(map(_toml, wanted.values))
    if isinstance(wanted, inspect.VarTupleType):
        if isinstance(wanted.item_type, inspect.StructType):
            return f"[[{name}]] tables"
        return 'a list, such as ["a", "b"]' if isinstance(wanted.item_type, inspect.StrType) else "a list"
    words = next((words for type_, words in _WORDS if isinstance(wanted, type_)), "a table")
    if isinstance(wanted, inspect.IntType) and wanted.ge is not None:
        return f"{words} from {wanted.ge}" + ("" if wanted.le is None else f" to {wanted.le}")
    if isinstance(wanted, inspect.FloatType) and wanted.gt is not None:
        return f"{words} above {wanted.gt:g}" + ("" if wanted.le is None else f", up to {wanted.le:g}")
    return f"{words}, not empty" if getattr(wanted, "min_length", None) else words


def _toml(value: Any) -> str:
    """Return a short value about as TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    text = f'"{value}"' if isinstance(value, str) else "{...}" if isinstance(value, Mapping) else str(value)
    return text if len(text) <= 60 else f"{text[:58]} …"
