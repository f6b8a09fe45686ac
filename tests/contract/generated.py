"""Generated parts of the documents. `make docs` writes them, and a test fails if one is stale.

PAGES are whole files. BLOCKS are parts of a document between two marks:

    <!-- generated: NAME -->
    (the block)
    <!-- end of generated -->
"""

import json
import re
import sys
import textwrap
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import click
from test_layers import LAYERS, REPO

if TYPE_CHECKING:
    from orchestrator.settings import Setting

PAPERS = ("dymoe", "dynaexq", "firm", "context")
MARKED = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end of generated -->)", re.DOTALL)
WIDTH = 88
# The default of samplers that are passed to llama.cpp only if they are given.
UPSTREAM_DEFAULT = "llama.cpp's"


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


def paper_block(name):
    """Return the comparisons of a paper from docs/papers/NAME.json.

    The file is the one that `moe-edge paper` writes, without the details of each table.
    """
    from orchestrator.lab.papers.paper import compared_markdown, heading

    path = REPO / "docs" / "papers" / f"{name}.json"
    if not path.exists():
        return "Not measured yet.\n"
    result = json.loads(path.read_text())
    return f"{heading(result)}.\n\n{compared_markdown(result)}\n"


def settings_page():
    """Return the page of all settings, grouped by the record that declares them."""
    from orchestrator.cli.options import of_policies
    from orchestrator.config import Config
    from orchestrator.policy import owners, policy_settings
    from orchestrator.serve.settings import ServeSettings
    from orchestrator.settings import COMMON

    parts = [
        "# Settings",
        "Every setting with its range and default; `make docs` writes this page. Options belong "
        "to `moe-edge chat` and the other commands that run a model. `Config.build` in Python and "
        "`--model_args` of [the harness](quality.md) take all settings by name (`--high-tier` is "
        "`high_tier`). Options in italics are shown by `--help-all` only, which also has the full "
        "text of each.",
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
    """A row for each setting, and one sentence for llama.cpp's samplers.

    common: groups whose options `--help` shows.
    """
    declared = list(declared)
    rows = ["| setting | values (default) | effect |", "|---|---|---|"]
    samplers = [each for each in declared if default_of(each) == UPSTREAM_DEFAULT]
    for each in declared:
        if each in samplers:
            continue
        name = f"`{each.flag if each.option else each.name}`"
        if each.option and each.group not in common:
            name = f"*{name}*"
        effect = in_short(each.help) if each.option else each.help
        default = f" ({default_of(each)})" if default_of(each) else ""
        rows.append(f"| {name} | {values_of(each)}{default} | {effect} |")
    if samplers:
        names = ", ".join(f"*`{each.flag}`* ({values_of(each)})" for each in samplers)
        rows += ["", f"Further samplers, with the meaning and the defaults of llama.cpp: {names}."]
    return "\n".join(rows)


def in_short(text):
    """The first sentence of a help text, or the whole text if that sentence has few words."""
    first = re.split(r"(?<=\.) (?=[A-Z])", text, maxsplit=1)[0]
    return first if len(first.split()) > 3 else text


def default_of(declared):
    if bool in declared.kinds and declared.shown is None:
        return declared.default_text or "no"
    return declared.default_text


def values_of(declared):
    """Return the allowed values of a setting as text."""
    if declared.choices:
        return ", ".join(declared.choices)
    if declared.unit is not None:
        return "a size" + (" or 0" if declared.unit == "rate" else "")
    if bool in declared.kinds:
        return "yes or no"
    if declared.within is None:
        known = {"FILE": "a file", "DIR": "a folder", "TEXT": "a text"}
        return known.get(declared.metavar, "a name")
    low, high = declared.within
    upper = "or more" if high == float("inf") else f"to {high:,}"
    return f"{low:,} {upper}"


PAGES: dict[str, Callable[[], str]] = {"docs/settings.md": settings_page}
BLOCKS: dict[str, Callable[[], str]] = {
    "layers": layers_block,
    "architectures": architectures_block,
    "policies": policies_block,
    **{f"paper-{name}": partial(paper_block, name) for name in PAPERS},
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
