"""Generated parts of the documents. `make docs` writes them, and a test fails if one is stale.

PAGES are whole files. BLOCKS are parts of a document between two marks:

    <!-- generated: NAME -->
    (the block)
    <!-- end of generated -->
"""

import re
import sys
import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING

import click
from test_layers import LAYERS, REPO

if TYPE_CHECKING:
    from orchestrator.settings import Setting

MARKED = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end of generated -->)", re.DOTALL)
WIDTH = 88


def program():
    from orchestrator.cli import main as cli

    return next(value for value in vars(cli).values() if isinstance(value, click.Group))


def commands_of(group):
    """Return the commands of a group, which imports them lazily."""
    ctx = click.Context(group)
    found = {name: group.get_command(ctx, name) for name in group.list_commands(ctx)}
    return {name: command for name, command in found.items() if command is not None}


def layers_block():
    """Return one line for each layer, the highest first."""
    lines = []
    for names in reversed(LAYERS):
        packages: dict[str, list[str]] = {}
        for name in names:
            package, _, module = name.partition(".")
            packages.setdefault(package, []).append(module or "all else")
        line = "; ".join(f"{name}: {', '.join(sorted(found))}" for name, found in packages.items())
        lines.append(textwrap.fill(line, WIDTH, subsequent_indent="    ", break_on_hyphens=False))
    return "```\n" + "\n".join(lines) + "\n```\n"


def architectures_block():
    """Return the tested architectures, grouped by the reason why look-ahead is missing."""
    from gguf_tools.experts import PROVEN

    groups: dict[str, list[str]] = {}
    for name, why_not in sorted(PROVEN.items()):
        groups.setdefault(why_not, []).append(f"`{name}`")
    lines = [
        textwrap.fill(
            f"- {f'Without look-ahead, {why_not}' if why_not else 'With look-ahead'}: "
            + ", ".join(names) + ".",
            WIDTH, subsequent_indent="  ", break_on_hyphens=False,
        )
        for why_not, names in sorted(groups.items())
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def policies_block():
    """Return a table of the policies and their summaries."""
    from orchestrator.policy import PLAIN, POLICIES

    rows = [
        "| policy | what it does |",
        "|---|---|",
        f"| `{PLAIN}` | Upstream's own path: everything is in memory, and there is no store. |",
    ]
    rows += [f"| `{name}` | {policy.summary} |" for name, policy in POLICIES.items()]
    return "\n".join(rows) + "\n"


def settings_page():
    """Return the page of all settings, grouped by the record that declares them."""
    from orchestrator.cli.options import of_policies
    from orchestrator.config import Config
    from orchestrator.policy import owners, policy_settings
    from orchestrator.serve.settings import ServeSettings
    from orchestrator.settings import COMMON

    parts = [
        "# Settings",
        "Every setting as it is declared, with its range and its default. `make docs` writes this "
        "page. A setting with an option can be given to `moe-edge chat` and to the commands that "
        "run a model; all of them can be given to `Config.build` in Python and to "
        "`--model_args` of [the harness](quality.md). The ones in italics are left out of "
        "`--help`, and shown by `--help-all`.",
        "## Of every policy",
        settings_table(Config.declared().values(), *COMMON),
    ]
    by_policies: dict[str, list[Setting]] = {}
    for name, each in policy_settings().items():
        by_policies.setdefault(of_policies(owners(name)), []).append(each)
    for heading, own in by_policies.items():
        parts += [f"## {heading}", settings_table(own, *COMMON)]
    parts += ["## Of the server", settings_table(ServeSettings.declared().values(), "")]
    return "\n\n".join(parts) + "\n"


def settings_table(declared, *common):
    """Return a table with a row for each setting. common: groups whose options are in `--help`."""
    rows = ["| setting | option | values | default | what it does |", "|---|---|---|---|---|"]
    for each in declared:
        flag = f"`{each.flag}`" if each.option else ""
        if flag and each.group not in common:
            flag = f"*{flag}*"
        rows.append(
            f"| `{each.name}` | {flag} | {values_of(each)} "
            f"| {default_of(each)} | {each.help} |".replace("|  |", "| |")
        )
    return "\n".join(rows)


def default_of(declared):
    if bool in declared.kinds and declared.shown is None:
        return declared.default_text or "no"
    return declared.default_text


def values_of(declared):
    """Return the allowed values of a setting as text."""
    if declared.choices:
        return ", ".join(declared.choices)
    if declared.unit is not None:
        return "a size as 64MiB" + (", or 0" if declared.unit == "rate" else "")
    if bool in declared.kinds:
        return "yes or no"
    if declared.within is None:
        known = {"FILE": "a file", "DIR": "a folder", "TEXT": "a text"}
        return known.get(declared.metavar, "a name")
    low, high = declared.within
    upper = "or more" if high == float("inf") else f"to {high:,}"
    return f"{'a number' if float in declared.kinds else 'a whole number'}, {low:,} {upper}"


PAGES: dict[str, Callable[[], str]] = {"docs/settings.md": settings_page}
BLOCKS: dict[str, Callable[[], str]] = {
    "layers": layers_block,
    "architectures": architectures_block,
    "policies": policies_block,
}


def documents():
    """Return the paths of all documents, from the repository's root."""
    patterns = ("*.md", "docs/**/*.md", "models/**/*.md")
    return sorted(
        path.relative_to(REPO).as_posix() for pattern in patterns for path in REPO.glob(pattern)
    )


def renewed(name):
    """Return the text of a document with its generated parts renewed."""
    if name in PAGES:
        return PAGES[name]()
    text = (REPO / name).read_text()
    return MARKED.sub(lambda match: match[1] + BLOCKS[match[2]]() + match[3], text)


def main():
    for name in sorted({*documents(), *PAGES}):
        text = renewed(name)
        path = REPO / name
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            print(f"wrote {name}")


if __name__ == "__main__":
    sys.path.insert(0, str(REPO))
    main()
