"""Imports point down: nobody imports a layer above its own, and no two modules each other."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PACKAGES = ("gguf_tools", "orchestrator", "models", "patches")

# Lowest first. A name stands for the module or package and all that is in it; the longest
# matching name decides.
LAYERS = (
    ("gguf_tools.closing", "gguf_tools.errors", "gguf_tools.interrupts"),
    (
        "gguf_tools.columns",
        "gguf_tools.file",
        "gguf_tools.process",
        "gguf_tools.progress",
        "gguf_tools.units",
    ),
    ("gguf_tools.experts", "gguf_tools.workers"),
    ("gguf_tools.hub", "gguf_tools.inspect", "gguf_tools.quantize", "gguf_tools.synthetic"),
    ("gguf_tools.pack", "gguf_tools.verify"),
    ("gguf_tools.convert",),
    ("gguf_tools", "orchestrator.errors", "orchestrator.events", "orchestrator.settings"),
    ("orchestrator.allocation",),
    ("orchestrator.policy",),
    ("orchestrator.config",),
    ("orchestrator.cache", "orchestrator.native"),
    ("orchestrator.memory",),
    ("orchestrator.cost",),
    ("orchestrator.engine",),
    ("orchestrator.chat", "orchestrator.serve", "orchestrator.lab"),
    ("orchestrator.cli",),
    ("orchestrator.__main__",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

# Who may use a library at all, by first component of what is imported.
ONLY = {
    "click": ("orchestrator.cli",),
    "starlette": ("orchestrator.serve",),
    "uvicorn": ("orchestrator.serve.run",),
    "lm_eval": ("orchestrator.lab.eval.harness",),
    "huggingface_hub": ("gguf_tools.hub",),
    "torch": ("gguf_tools.quantize.gptq", "gguf_tools.convert.upstream", "models"),
    "transformers": ("gguf_tools.convert.upstream", "models"),
    "safetensors": ("models",),
}


def module_name(path: Path) -> str:
    parts = path.relative_to(REPO).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources() -> dict[str, Path]:
    return {
        module_name(path): path
        for package in PACKAGES
        for path in sorted((REPO / package).rglob("*.py"))
    }


def imports(path: Path, known: set[str], at_load: bool = False) -> set[str]:
    """Dotted names that a file imports; at_load leaves out functions and TYPE_CHECKING."""
    name = module_name(path)
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if at_load and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            return
        if at_load and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) + 1 - node.level]
            source = ".".join(base) if node.level else ""
            source = ".".join(part for part in (source, node.module) if part)
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                found.add(inner if inner in known else source)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


def rank(name: str) -> int | None:
    while name:
        if name in RANK:
            return RANK[name]
        name = name.rpartition(".")[0]
    return None


SOURCES = sources()
LAB = "orchestrator.lab."


@pytest.mark.parametrize("name", SOURCES)
def test_imports_point_down(name: str) -> None:
    for target in sorted(imports(SOURCES[name], set(SOURCES))):
        top = target.split(".")[0]
        if top in ("gguf_tools", "orchestrator"):
            mine, theirs = rank(name), rank(target)
            if name == "orchestrator" or name.startswith("models"):
                continue
            assert mine is not None, f"{name} has no layer: add it to LAYERS"
            assert theirs is not None, f"{target} has no layer: add it to LAYERS"
            assert theirs <= mine, f"{name} imports {target}, which is above it"
        elif top == "patches":
            assert name.startswith("patches"), f"{name} imports the build tool"
        elif top == "models":
            assert name.startswith("models"), f"{name} imports the demo's training code"


@pytest.mark.parametrize("name", SOURCES)
def test_libraries_stay_where_they_belong(name: str) -> None:
    for target in sorted(imports(SOURCES[name], set(SOURCES))):
        allowed = ONLY.get(target.split(".")[0])
        if allowed is not None:
            assert any(name == where or name.startswith(where + ".") for where in allowed), (
                f"{name} imports {target}; only {', '.join(allowed)} may"
            )


@pytest.mark.parametrize("name", SOURCES)
def test_what_runs_does_not_import_what_measures(name: str) -> None:
    """Not even inside a function. The command line imports it where a command asks for it."""
    found = imports(SOURCES[name], set(SOURCES))
    measures = {each for each in found if f"{each}.".startswith(LAB)}
    may = f"{name}.".startswith((LAB, "orchestrator.cli."))
    assert may or not measures, f"{name} imports {', '.join(measures)}"


def test_no_import_cycles() -> None:
    graph = {
        name: imports(path, set(SOURCES), at_load=True) & set(SOURCES)
        for name, path in SOURCES.items()
    }
    state: dict[str, int] = {}

    def walk(name: str, trail: list[str]) -> None:
        if state.get(name) == 2:
            return
        assert state.get(name) != 1, " -> ".join([*trail[trail.index(name) :], name])
        state[name] = 1
        for target in sorted(graph[name]):
            # A package and its own modules import each other by construction.
            if target != name and not name.startswith(target + "."):
                walk(target, [*trail, name])
        state[name] = 2

    for name in sorted(graph):
        walk(name, [])


def test_the_walk_sees_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "REPO", tmp_path)
    path = tmp_path / "orchestrator" / "policy" / "odd.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "from ..engine import Engine\nfrom . import base\ndef late():\n    import click\n"
    )
    known = {"orchestrator.policy.base"}
    assert imports(path, known) == {
        "orchestrator.engine",
        "orchestrator.policy.base",
        "click",
    }
    assert imports(path, known, at_load=True) == {
        "orchestrator.engine",
        "orchestrator.policy.base",
    }


def test_patches_need_the_standard_library_only() -> None:
    import sys

    for name, path in SOURCES.items():
        if name.startswith("patches"):
            for target in imports(path, set(SOURCES)):
                top = target.split(".")[0]
                # pip runs that one, where setuptools is.
                is_there = name == "patches.backend" and top == "setuptools"
                known = top == "patches" or top in sys.stdlib_module_names or is_there
                assert known, f"{name}: {target}"
