"""Groups of lazily imported commands."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import click

from groupbench.tracker.facts.errors import TrackerError
from groupbench.tracker.text.wording import closest
from groupbench.tracker.tools import shell

Commands = Mapping[str, tuple[str, str]]
"""Commands by name: (module:attribute in this package, one line of help)."""

PACKAGE = __name__.rpartition(".")[0]


class LazyGroup(click.Group):
    """A group of lazily imported commands.

    Args:
        commands: The commands of the group.
        default: Command to run if the first argument is an option, or missing.
    """

    def __init__(self, *args: Any, lazy: Commands, default: str | None = None, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.lazy, self.default = lazy, default

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.lazy:
            return None
        module, attribute = self.lazy[cmd_name][0].split(":")
        command: click.Command = getattr(importlib.import_module(f"{PACKAGE}.{module}"), attribute)
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        by_default = not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names)
        if self.default is not None and by_default and not ctx.resilient_parsing:
            args = [self.default, *args]
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.lazy and not ctx.resilient_parsing:
            raise click.UsageError(self.unknown(ctx, args[0]), ctx)
        return super().resolve_command(ctx, args)

    def unknown(self, ctx: click.Context, name: str) -> str:
        """Return the error for an unknown command."""
        meant = closest(name, self.lazy)
        words = ["groupbench", *ctx.command_path.split()[1:], "--help"]
        return f"no command {name!r}; " + (f"did you mean {meant!r}?" if meant else f"see `{' '.join(words)}`")

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, short) for name, (_, short) in self.lazy.items()])


class Program(LazyGroup):
    """The whole program: global options may follow the command, and each error is one line.

    Args:
        sections: Commands by help title.
        groups: Commands of the groups.
        defaults: Default commands of groups.
    """

    def __init__(
        self,
        *args: Any,
        sections: Mapping[str, Commands],
        groups: Mapping[str, Commands],
        defaults: Mapping[str, str],
        **settings: Any,
    ) -> None:
        lazy = {name: entry for commands in sections.values() for name, entry in commands.items()}
        super().__init__(*args, lazy=lazy, **settings)
        self.sections, self.groups, self.defaults = sections, groups, defaults

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.groups:
            return super().get_command(ctx, cmd_name)
        about, default = self.lazy[cmd_name][0], self.defaults.get(cmd_name)
        return LazyGroup(cmd_name, help=about, lazy=self.groups[cmd_name], default=default)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. Options of the program may also follow the command."""
        return super().parse_args(ctx, self._own_options_first(ctx, args))

    def _own_options_first(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Return `args` with the program's options in front. Raises UsageError if a value is missing."""
        options = [param for param in self.params if isinstance(param, click.Option) and param.expose_value]
        has_value = {name: not (param.is_flag or param.count) for param in options for name in param.opts}
        has_value["-vv"] = False
        first: list[str] = []
        others: list[str] = []
        words = iter(args)
        for word in words:
            if word == "--":
                others += [word, *words]
            elif (name := word.partition("=")[0]) not in has_value:
                others.append(word)
            elif "=" in word or not has_value[name]:
                first.append(word)
            elif (value := next(words, None)) is not None:
                first += [word, value]
            else:
                raise click.BadOptionUsage(word, f"Option {word!r} requires an argument.", ctx)
        return first + others

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an exception explained by damage or the driver is raised as the explanation."""
        try:
            return super().invoke(ctx)
        except (TrackerError, click.ClickException, click.exceptions.Exit, click.Abort, OSError):
            raise  # `shell.run` reports these
        except Exception as error:
            from groupbench.tracker.store.failures import explained

            explanation = explained(error, ctx.obj)
            if explanation is None:
                raise
            raise explanation from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, self.lazy))  # the same column in every section
        formatter.write_paragraph()
        for title, commands in self.sections.items():
            formatter.write_heading(title)
            with formatter.indentation():
                formatter.write_dl([(f"{name:{width}}", short) for name, (_, short) in commands.items()])

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> NoReturn:
        shell.run("groupbench", self, TrackerError, args, prog_name, **extra)
