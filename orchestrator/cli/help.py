"""Formats `--help`, which lists the common options in groups, and `--help-all`, which lists all.

Each option names its group. Options of policies are listed under the names of the policies.
"""

from __future__ import annotations

import difflib
import re
import shutil
from typing import Any

import click

from gguf_tools.columns import explained
from orchestrator.settings import COMMON, MORE

# Key in a click context: whether --help-all was given.
_ALL = "moe-edge.help-all"
_MOST_COLUMNS = 80


class Option(click.Option):
    """A command-line option that is listed in a named group of the help.

    `--help` shows the options without a group, and then the groups in COMMON. `--help-all` shows
    the other groups too.
    """

    def __init__(self, *args: Any, group: str = "", **said: Any) -> None:
        super().__init__(*args, **said)
        self.group = group


def _help_all(ctx: click.Context, _param: click.Parameter, asked: bool) -> None:
    if asked and not ctx.resilient_parsing:
        ctx.meta[_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


class Command(click.Command):
    """A command whose help shows its options in groups."""

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
        # On a narrow terminal click would write longer lines than fit.
        ctx.terminal_width = min(shutil.get_terminal_size().columns, _MOST_COLUMNS) - 2
        return super().get_help(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options of a command in groups. The options --help and --help-all come last."""
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
                of_help.pop()  # --help-all would show nothing more
            shown = {
                name: [(flags, _in_short(text)) for flags, text in found]
                for name, found in usual.items()
            }
        last = MORE if any(shown) else ""
        shown[last] = shown.get(last, []) + of_help
        shown = {name or "Options": found for name, found in shown.items()}
        formatter.write(f"\n{explained(shown, formatter.width)}\n")


class Group(Command, click.Group):
    """A group of commands that may have options of its own."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_options(ctx, formatter)
        self.format_commands(ctx, formatter)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command with the given name.

        If the name is unknown, the error suggests the nearest name.
        """
        known = self.list_commands(ctx)
        near = difflib.get_close_matches(args[0], known, 1)
        if near and args[0] not in known and not ctx.resilient_parsing:
            ctx.fail(f"No such command '{args[0]}': did you mean {near[0]}?")
        return super().resolve_command(ctx, args)


def _in_short(text: str) -> str:
    """Return the first sentence of an option's help, followed by the option's default."""
    default = re.search(r"  \[default: .*?\]", text)
    sentence, dot, _ = text.partition(". ")
    return sentence + dot.rstrip() + (default[0] if default else "")
