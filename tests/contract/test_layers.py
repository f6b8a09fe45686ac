"""Imports point down: no module imports a higher layer, and there are no import cycles."""

import ast
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PACKAGES = ("gguf_tools", "orchestrator", "models", "patches")
# The lowest layer first. A name covers the module or package and everything in it. The longest
# matching name counts.
LAYERS = (
    ("gguf_tools.closing", "gguf_tools.errors", "gguf_tools.interrupts"),
    (
        *("gguf_tools.built", "gguf_tools.columns", "gguf_tools.file", "gguf_tools.process"),
        *("gguf_tools.progress", "gguf_tools.units"),
    ),
    ("gguf_tools.experts", "gguf_tools.workers"),
    (
        *("gguf_tools.hub", "gguf_tools.inspect", "gguf_tools.known", "gguf_tools.quantize"),
        "gguf_tools.synthetic",
    ),
    ("gguf_tools.pack", "gguf_tools.verify"),
    ("gguf_tools.convert",),
    ("gguf_tools", "orchestrator.errors", "orchestrator.events", "orchestrator.settings"),
    ("orchestrator.allocation",),
    ("orchestrator.policy",),
    ("orchestrator.config",),
    ("orchestrator.cache", "orchestrator.native"),
    ("orchestrator.plan",),
    ("orchestrator.cost",),
    ("orchestrator.runtime",),
    ("orchestrator.chat", "orchestrator.serve", "orchestrator.lab"),
    ("orchestrator.library",),
    ("orchestrator.cli",),
    ("orchestrator.__main__",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
# Modules that may import a library, by the first component of its name.
ONLY = {
    "click": ("orchestrator.cli",),
    "starlette": ("orchestrator.serve",),
    "uvicorn": ("orchestrator.serve.run",),
    "ray": ("orchestrator.serve.fleet", "orchestrator.serve.routing"),
    "tqdm": ("orchestrator.library.progress",),
    "lm_eval": ("orchestrator.lab.eval.harness", "models"),
    "huggingface_hub": ("gguf_tools.hub",),
    "torch": ("gguf_tools.quantize.gptq", "gguf_tools.convert.upstream", "models"),
    "transformers": ("gguf_tools.convert.upstream", "models"),
    "safetensors": ("models",),
}


def module_name(path):
    parts = path.relative_to(REPO).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources():
    return {
        module_name(path): path
        for package in PACKAGES
        for path in sorted((REPO / package).rglob("*.py"))
    }


def imports(path, known, at_load=False):
    """Return the dotted names that a file imports.

    at_load: skip imports in functions and under TYPE_CHECKING.
    """
    name = module_name(path)
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    found = set()

    def visit(node):
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


def rank(name):
    while name:
        if name in RANK:
            return RANK[name]
        name = name.rpartition(".")[0]
    return None


SOURCES = sources()
LAB = "orchestrator.lab."


def fault_of_layers(name, target):
    """Return why a module may not import one of our modules, or None."""
    top = target.split(".")[0]
    if top == "patches" and not name.startswith("patches"):
        return "the build tool"
    if top == "models" and not name.startswith("models"):
        return "scripts that make models"
    users = (LAB, "orchestrator.cli.", "orchestrator.library.", "models.")
    if f"{target}.".startswith(LAB) and not f"{name}.".startswith(users):
        return (
            "code that measures; only commands, the library and the models' own scripts import it"
        )
    if top not in ("gguf_tools", "orchestrator"):
        return None
    if name == "orchestrator" or name.startswith("models"):
        return None
    mine, theirs = rank(name), rank(target)
    if mine is None or theirs is None:
        return "one of the two has no layer: add it to LAYERS"
    return "it is above" if theirs > mine else None


def fault_of_libraries(name, target):
    """Return why a module may not import a library, or None."""
    top = target.split(".")[0]
    allowed = ONLY.get(top)
    if allowed and not any(name == where or name.startswith(f"{where}.") for where in allowed):
        return f"only {', '.join(allowed)} may import it"
    # pip runs patches.backend, with setuptools installed.
    is_there = (name, top) == ("patches.backend", "setuptools")
    if name.startswith("patches") and top not in {"patches", *sys.stdlib_module_names}:
        return None if is_there else "more than the standard library"
    return None


@pytest.mark.parametrize("name", SOURCES)
def test_imports_respect_layers_and_libraries(name):
    """Imports within functions count too."""
    for target in sorted(imports(SOURCES[name], set(SOURCES))):
        fault = fault_of_layers(name, target) or fault_of_libraries(name, target)
        assert not fault, f"{name} imports {target}: {fault}"


def test_no_import_cycles():
    """Imports between a package and its own modules do not count."""
    graph = {
        name: {
            target
            for target in imports(path, set(SOURCES), at_load=True) & set(SOURCES)
            if not f"{name}.".startswith(f"{target}.")
        }
        for name, path in SOURCES.items()
    }
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the modules
