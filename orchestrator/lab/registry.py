"""The list of all benchmarks and papers by name.

A module is imported only when it is loaded, so that the command line starts quickly.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple


class BenchmarkEntry(NamedTuple):
    """A benchmark in the list of all benchmarks.

    - where: the module and class that implement it, such as "bench.gpu:Gpu".
    - help: its help text on the command line.
    """

    where: str
    help: str


# Benchmarks by name. The command without a name, `moe-edge bench`, has the name "".
BENCHMARKS = {
    "": BenchmarkEntry(
        "bench.caps:Caps",
        "Compare upstream llama.cpp and all policies under memory caps on this machine.\n\n"
        "Options of the commands below must follow the command's name.",
    ),
    "gpu": BenchmarkEntry(
        "bench.gpu:Gpu",
        "Compare upstream llama.cpp and all policies on a GPU.\n\n"
        "A cap is the share of the expert bytes that fits in the GPU's memory next to the rest of "
        "the model. Upstream keeps the experts of the remaining layers on the CPU.",
    ),
    "paired": BenchmarkEntry(
        "bench.paired:Paired",
        "Compare the speed of two settings, of two checkouts, or with upstream llama.cpp.\n\n"
        "Both sides are loaded and take turns, so that other load on the machine affects both "
        "equally. This shows differences of one or two percent.",
    ),
}

# Modules of the package `papers`, each with a list of tables and figures.
PAPERS = ("dymoe", "dynaexq", "firm", "context")


def load(name: str) -> Any:
    """Import a benchmark's module, and return a new object of its class.

    `name` is a key of BENCHMARKS, such as "gpu".
    """
    module, _, kind = BENCHMARKS[name].where.partition(":")
    return getattr(import_module(f"{__package__}.{module}"), kind)()


def load_paper(name: str) -> Any:
    """Import a paper's module by name, such as "dymoe", and return its tables and figures."""
    return import_module(f"{__package__}.papers.{name}").PAPER
