"""Paths, commands and options that a document names exist, and its generated parts are current."""

import importlib.util
import os
import re
import shlex
from datetime import date
from pathlib import Path

import click
import pytest
from command_line import python
from generated import BLOCKS, MARKED, PAGES, REPO, commands_of, documents, program, renewed

DOCS = documents()
WRITTEN = [name for name in DOCS if name not in PAGES]
FOLDERS = r"(?:gguf_tools|orchestrator|patches|models|tests|docs|\.ci)"
LINK = re.compile(r"\]\(([^)#:\s]*)(?:#([^)]*))?\)")
EXPERIMENT_PAGES = [name for name in DOCS if name.startswith("docs/experiments/")]
MOST_LINES = {
    "README.md": 120, "ARCHITECTURE.md": 220, "EXPERIMENTS.md": 200, "CHANGELOG.md": 80,
} | dict.fromkeys(EXPERIMENT_PAGES, 60)  # fmt: skip
MOST_CLAIMS = 60
MOST_EXPERIMENT_PAGES = 8
CLAIM_COLUMNS = ["claim", "number", "machine", "date", "command", "verdict"]
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e-\d+)?(?:-\d+(?:\.\d+)?)?")


def text_of(name):
    path = REPO / name
    assert path.exists(), f"{name} is missing"
    return path.read_text()


def own_text(name):
    """Return a document without its generated parts."""
    return MARKED.sub("", text_of(name))


def code_of(text):
    """Lines of fenced blocks and inline code spans."""
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    blocks += re.findall(r"(?:^    \S.*\n)+", text, re.MULTILINE)
    rest = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()]
    return [line.strip() for line in [*lines, *re.findall(r"`([^`\n]+)`", rest)]]


def prose_of(text):
    return re.sub(r"^```.*?^```\n", "", text, flags=re.DOTALL | re.MULTILINE)


def exists(pattern):
    """Return whether a path exists. {a,b} and NAME match any text."""
    pattern = pattern.replace("NAME", "*")
    pattern = re.sub(r"\{[^}]*\}", "*", pattern.rstrip("/."))
    return any(True for _ in REPO.glob(pattern))


def linked(name):
    """Return (file, anchor) of every link of a document into the repository."""
    found = set()
    for target, anchor in LINK.findall(prose_of(text_of(name))):
        file = (REPO / name).parent / target if target else REPO / name
        found.add((Path(os.path.normpath(file)), anchor))
    return found


def anchors_of(path):
    """Return the anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose_of(path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", WRITTEN)
def test_named_paths_exist(name):
    text = own_text(name)
    named = set(re.findall(rf"(?<![\w/.-]){FOLDERS}/[\w./*{{}},-]*", text))
    named |= set(re.findall(r"(?<![\w/.-])[A-Z]{4,}\.md\b", text))
    missing = sorted(path for path in named if not exists(path))
    assert not missing, f"{name} names {', '.join(missing)}"


@pytest.mark.parametrize("name", DOCS)
def test_links_have_targets(name):
    for path, anchor in linked(name):
        assert path.exists(), f"{name} links to {os.path.relpath(path, REPO)}"
        if anchor:
            assert anchor in anchors_of(path), f"{name} links to {path.name}#{anchor}"


def test_every_page_is_linked():
    reached = {
        path
        for name in DOCS
        for path, _ in linked(name)
        if path != REPO / name and path.is_relative_to(REPO / "docs")
    }
    pages = {REPO / name for name in DOCS if name.startswith("docs/")}
    lost = sorted(path.name for path in pages - reached)
    assert pages and not lost, f"no document links to {', '.join(lost)}"


@pytest.mark.parametrize("name", MOST_LINES)
def test_pages_within_their_line_limit(name):
    lines = len(text_of(name).splitlines())
    assert lines <= MOST_LINES[name], f"{name} has {lines} lines: detail belongs in docs/"


def dated(text, where):
    """Fail if the text does not end with a date in brackets, such as (2026-11-21)."""
    ends = re.search(r" \((\d{4}-\d{2}-\d{2})\)$", text)
    assert ends, f"{where}: {text!r} does not end with a date as (2026-11-21)"
    date.fromisoformat(ends[1])


def numbers_in(cell):
    """The numbers of a cell. Brackets hold intervals and errors, and count for nothing."""
    return NUMBER.findall(re.sub(r"\(.*?\)", "", cell))


def test_every_claim_has_a_number_a_machine_a_date_a_command_and_a_verdict():
    """Each section of EXPERIMENTS.md is one table of claims, or a list of dropped work."""
    _, *sections = re.split(r"^## ", text_of("EXPERIMENTS.md"), flags=re.MULTILINE)
    claims = 0
    for section in sections:
        title, body = section.split("\n", 1)
        rows = [line for line in body.splitlines() if line.startswith("|")]
        items = re.findall(r"^- (.+(?:\n  .+)*)", body, re.MULTILINE)
        assert bool(rows) != bool(items), f"EXPERIMENTS.md, {title}: one table or one list"
        for item in items:
            dated(" ".join(item.split()), f"EXPERIMENTS.md, {title}")
        for place, row in enumerate(rows):
            cells = [cell.strip() for cell in row.strip("|").split("|")]
            if place == 0:
                assert cells == CLAIM_COLUMNS, f"EXPERIMENTS.md, {title}: columns {cells}"
            elif place > 1:
                claims += 1
                assert len(cells) == len(CLAIM_COLUMNS) and all(cells), f"EXPERIMENTS.md: {row}"
                _, number, _, day, command, _ = cells
                date.fromisoformat(day)
                assert len(numbers_in(number)) == 1, f"EXPERIMENTS.md: not one number: {number!r}"
                first = place == 2 and command.startswith("the same")
                assert not first, f"EXPERIMENTS.md, {title}: the first command must be complete"
    assert 0 < claims <= MOST_CLAIMS, f"EXPERIMENTS.md has {claims} claims"


def test_there_are_few_experiment_pages():
    assert len(EXPERIMENT_PAGES) <= MOST_EXPERIMENT_PAGES


@pytest.mark.parametrize("name", EXPERIMENT_PAGES)
def test_every_section_of_an_experiment_has_a_day(name):
    headings = re.findall(r"^##+ (.+)$", prose_of(text_of(name)), re.MULTILINE)
    assert headings, f"{name} has no section"
    for heading in headings:
        dated(heading, name)
    reached = {path for path, _ in linked("EXPERIMENTS.md")}
    assert REPO / name in reached, f"EXPERIMENTS.md does not link to {name}"


def test_docs_list_every_patch_and_native_source():
    """A header with the same name as a source does not need its own line."""
    text = text_of("docs/native.md")
    native = REPO / "patches" / "native"
    sources = set(native.rglob("*.c*"))
    stems = {path.with_suffix("") for path in sources}
    sources |= {path for path in native.rglob("*.h") if path.with_suffix("") not in stems}
    names = {path: {str(path.relative_to(native)), path.name} for path in sources}
    names |= {path: {f"patches/{path.name}"} for path in native.parent.glob("*.patch")}
    missing = [
        path.name
        for path, shown in sorted(names.items())
        if not any(f"`{each}`" in text for each in shown)
    ]
    assert sources and not missing, f"docs/native.md does not name {', '.join(missing)}"


@pytest.mark.parametrize("name", WRITTEN)
def test_named_classes_and_functions_exist(name):
    """For example `Driver.on_route` in `orchestrator/runtime/driver.py`."""
    for named, path in re.findall(r"`([\w.]+)` in\s`([\w/]+\.py)`", text_of(name)):
        source = (REPO / path).read_text()
        for part in named.split("."):
            found = re.search(rf"\b(class|def) {part}\b|^\s*{part}\b.*=", source, re.MULTILINE)
            assert found, f"{name} names {named} in {path}, which has no {part}"


@pytest.mark.parametrize("name", WRITTEN)
def test_named_commands_exist(name):
    targets = re.findall(r"^([a-z-]+):", text_of("Makefile"), re.MULTILINE)
    for line in code_of(own_text(name)):
        for target in re.findall(r"^(?:\$ )?make ([a-z-]+)", line):
            assert target in targets, f"{name}: make {target}"
        for module in re.findall(r"python3? -m ([\w.]+)", line):
            assert importlib.util.find_spec(module), f"{name}: python -m {module}"
        for word in re.findall(r"patches/tool\.py ([a-z][a-z-]*)", line):
            done = python("patches/tool.py", word, "--help")
            assert done.returncode == 0, f"{name}: patches/tool.py {word}"


def fault_of_call(line):
    """Return the unknown command or option in a line that calls moe-edge, or ""."""
    words = shlex.split(line.removeprefix("$ ").split(" #")[0].split(" | ")[-1])
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    if words[:1] != ["moe-edge"]:
        return ""
    command = program()
    rest = words[1:]
    while rest and isinstance(command, click.Group) and not rest[0].startswith("-"):
        if rest[0] not in commands_of(command):
            return f"no command {rest[0]!r}"
        command, rest = commands_of(command)[rest[0]], rest[1:]
    known = {"--help"}
    for parameter in command.get_params(click.Context(command, help_option_names=[])):
        known.update(parameter.opts + parameter.secondary_opts)
    options = [word.split("=")[0] for word in rest if re.match(r"--?[A-Za-z]", word)]
    return ", ".join(f"{command.name} has no {each}" for each in options if each not in known)


@pytest.mark.parametrize("name", WRITTEN)
def test_named_moe_edge_calls_exist(name):
    for line in code_of(own_text(name)):
        if re.match(r"(\$ )?([A-Z_]+=\S+ )*moe-edge( |$)", line) or "| moe-edge " in line:
            fault = fault_of_call(line)
            assert not fault, f"{name}: {line}: {fault}"


@pytest.mark.parametrize("name", sorted({*DOCS, *PAGES}))
def test_generated_parts_are_current(name):
    assert text_of(name) == renewed(name), f"{name}: run `make docs`"


def test_every_block_is_used():
    placed = {match[1] for name in DOCS for match in MARKED.findall(text_of(name))}
    assert placed == set(BLOCKS)


def statements(name):
    """Return the rows of EXPERIMENTS.md, or the sections of another document."""
    text = text_of(name)
    return (
        text.splitlines() if name == "EXPERIMENTS.md" else re.split(r"^(?=## )", text, flags=re.M)
    )


@pytest.mark.parametrize("name", DOCS)
def test_ratios_over_monde_are_marked_as_fitted(name):
    """The rate at which MoNDE moves experts was chosen to match the paper's ratios."""
    silent = [
        part[:80] for part in statements(name) if "monde" in part.lower() and "itted" not in part
    ]
    assert not silent, f"{name} does not mark MoNDE's migrations as fitted: {silent}"


# Results or choices of the papers that moe-edge does not have: (document, the words that say so).
DIFFERENCES = {
    "accuracy tables, first": ("docs/policies.md", "^# Policies.*?not reproduced.*?^## "),
    "accuracy tables, why": (
        "docs/policies.md",
        "MMLU, CMMLU and GSM8K.*?weights were not available",
    ),
    "accuracy tables, limits": ("README.md", "^## Limits.*?MMLU, CMMLU, GSM8K.*?not reproduced"),
    "lossless dymoe against lru": (
        "docs/policies.md",
        r"idle EPYC.*?\| 1\.18 \|.*?busy EPYC.*?\| 0\.94 \|",
    ),
    "Figure 5 of DyMoE": ("EXPERIMENTS.md", "deep layers are resilient[^\n]*the paper's not shown"),
    "MoL": ("EXPERIMENTS.md", "negative for MoL, for K <= k and for K > k too"),
    "MoL, page": ("docs/experiments/firm.md", "These rows have K <= k"),
    "slots of FIRM": ("docs/policies.md", "same number of slots"),
    "W of the last layer": ("docs/policies.md", "gate sums W come from the look-ahead"),
    "routers of the look-ahead": ("docs/policies.md", "copy of it in half precision"),
    "products at b bits": ("docs/replay.md", "16 / b [^\n]*our choice"),
    "HBM": ("docs/replay.md", r"HBM\) \| [^\n]*our choice"),
    "link": ("docs/replay.md", r"\| link \| [^\n]*our choice"),
    "HOBBIT": ("EXPERIMENTS.md", "Ours at 2 bits over HOBBIT[^\n]*1.8 x[^\n]*56 x"),
    "sensitivity": ("EXPERIMENTS.md", "moves from 5.8 to 12.5 with link and memory"),
    "placement at 2 bits": ("EXPERIMENTS.md", "any good placement is slower than none"),
}


@pytest.mark.parametrize(("name", "words"), DIFFERENCES.values(), ids=DIFFERENCES)
def test_differences_from_the_papers_are_named(name, words):
    pattern = words.replace(" ", r"\s+")  # lines may be wrapped in other places
    assert re.search(pattern, text_of(name), re.DOTALL | re.MULTILINE), f"{name} lacks {words!r}"


def test_cells_of_the_readme_hold_one_number():
    for row in re.findall(r"^\|(.*)\|$", text_of("README.md"), re.MULTILINE):
        for cell in row.split("|")[1:]:
            assert len(numbers_in(cell)) <= 1, f"README.md: the cell {cell.strip()!r} of {row!r}"
