"""How `--help` is written: the options that most people need, in groups; `--help-all` has every
option, those of each policy below its name. An option says its group itself."""

from __future__ import annotations

import difflib
import re
import shutil
from typing import Any

import click

from gguf_tools.columns import explained
from orchestrator.settings import COMMON, MORE

# Where a context keeps that every option was asked for.
_ALL = "moe-edge.help-all"
_MOST_COLUMNS = 80


class Option(click.Option):
    """An option in a group of the help: one of COMMON, or another one, which `--help` leaves out.
    Without a group it is of the command's own ones, which come first."""

    def __init__(self, *args: Any, group: str = "", **said: Any) -> None:
        super().__init__(*args, **said)
        self.group = group


def _help_all(ctx: click.Context, _param: click.Parameter, asked: bool) -> None:
    if asked and not ctx.resilient_parsing:
        ctx.meta[_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


class Command(click.Command):
    """A command whose options are shown in groups."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        help_all = Option(
            ["--help-all"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_help_all,
            help="Show every option and exit.",
        )
        return [*super().get_params(ctx), help_all]

    def get_help(self, ctx: click.Context) -> str:
        # Where the terminal is narrow, click would write lines that are longer.
        ctx.terminal_width = min(shutil.get_terminal_size().columns, _MOST_COLUMNS) - 2
        return super().get_help(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """As click calls it. What comes last is the help itself."""
        groups: dict[str, list[tuple[str, str]]] = {name: [] for name in ("", *COMMON, MORE)}
        of_help = []
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and {"--help", "--help-all"} & {*param.opts}:
                of_help.append(record)
            elif record is not None:
                groups.setdefault(getattr(param, "group", ""), []).append(record)
        shown = {name: found for name, found in groups.items() if found}
        if not ctx.meta.get(_ALL):
            usual = {name: found for name, found in shown.items() if name in ("", *COMMON)}
            if len(usual) == len(shown):
                of_help.pop()  # there are no more options
            shown = {
                name: [(flags, _in_short(text)) for flags, text in found]
                for name, found in usual.items()
            }
        last = MORE if any(shown) else ""
        shown[last] = shown.get(last, []) + of_help
        shown = {name or "Options": found for name, found in shown.items()}
        formatter.write(f"\n{explained(shown, formatter.width)}\n")


class Group(Command, click.Group):
    """Commands, and the options that they have in common."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_options(ctx, formatter)
        self.format_commands(ctx, formatter)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does it, with the nearest name where there is no such command."""
        known = self.list_commands(ctx)
        near = difflib.get_close_matches(args[0], known, 1)
        if near and args[0] not in known and not ctx.resilient_parsing:
            ctx.fail(f"No such command '{args[0]}': did you mean {near[0]}?")
        return super().resolve_command(ctx, args)


def _in_short(text: str) -> str:
    """The first sentence of an option's help, and its default."""
    default = re.search(r"  \[default: .*?\]", text)
    sentence, dot, _ = text.partition(". ")
    return sentence + dot.rstrip() + (default[0] if default else "")
