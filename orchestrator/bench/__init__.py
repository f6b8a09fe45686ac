"""Side-by-side measurements under memory caps, against upstream and against the bound."""

from orchestrator.bench.plan import BenchOptions
from orchestrator.bench.report import render
from orchestrator.bench.run import run

__all__ = ["BenchOptions", "render", "run"]
