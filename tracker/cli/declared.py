"""Commands with options as the defaults of their parameters: each option is declared once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import click


@dataclass(frozen=True)
class Declared:
    """An option or argument, as the default of a parameter or field."""

    kind: type[click.Parameter]
    flags: tuple[str, ...]
    settings: Mapping[str, Any]

    def parameters(self, name: str) -> list[click.Parameter]:
        return [self.kind(list(dict.fromkeys((*self.flags, name))), **self.settings)]

    def taken(self, name: str, values: dict[str, Any]) -> Any:
        return values.pop(name)


@dataclass(frozen=True)
class DeclaredGroup:
    """Options whose values make one object."""

    make: Callable[..., Any]
    options: Mapping[str, Declared]  # by field

    def parameters(self, name: str) -> list[click.Parameter]:
        return [parameter for field, each in self.options.items() for parameter in each.parameters(field)]

    def taken(self, name: str, values: dict[str, Any]) -> Any:
        return self.make(**{field: each.taken(field, values) for field, each in self.options.items()})


def option(*flags: str, help: str, **settings: Any) -> Any:
    """Declare an option. The help shows the default, if there is one, and NAME for a value without a type."""
    usual = {"show_default": True} | ({} if "type" in settings else {"metavar": "NAME"})
    return Declared(click.Option, flags, {"help": help, **usual, **settings})


def flag(*flags: str, help: str) -> Any:
    """Declare an option without a value."""
    return Declared(click.Option, flags, {"help": help, "is_flag": True})


def argument(**settings: Any) -> Any:
    """Declare an argument."""
    return Declared(click.Argument, (), settings)


def group(make: Callable[..., Any], **options: Declared) -> Any:
    """Declare the options whose values `make` gets, by name."""
    return DeclaredGroup(make, options)


def options(kind: type[Any]) -> Any:
    """Declare the options in the defaults of a data class's fields."""
    return DeclaredGroup(kind, {each.name: each.default for each in fields(kind) if isinstance(each.default, Declared)})


def command(name: str | None = None, **settings: Any) -> Callable[[Callable[..., Any]], click.Command]:
    """Return a decorator to make a command of a function.

    A parameter `context` gets click's context, `db` the database. The others' defaults declare options and arguments.
    """

    def decorate(function: Callable[..., Any]) -> click.Command:
        signature = inspect.signature(function).parameters
        declared = {key: each.default for key, each in signature.items() if each.default is not each.empty}

        @functools.wraps(function)
        def call(**values: Any) -> Any:
            context = click.get_current_context()
            by_click = {"context": context, "db": context.obj}
            taken = {key: each.taken(key, values) for key, each in declared.items()}
            return function(**{key: by_click[key] for key in signature if key in by_click}, **taken)

        parameters = [parameter for key, each in declared.items() for parameter in each.parameters(key)]
        make: Callable[..., click.Command] = click.command(name, params=parameters, **settings)
        return make(call)

    return decorate
