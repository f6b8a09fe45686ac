"""Side-by-side measurements under memory caps, against upstream and against the bound."""

from orchestrator.bench.ablation import AblationOptions, render_ablation, run_ablation
from orchestrator.bench.plan import BenchOptions
from orchestrator.bench.prefill import PrefillOptions, render_prefill, run_prefill
from orchestrator.bench.report import render
from orchestrator.bench.run import run

__all__ = [
    "AblationOptions",
    "BenchOptions",
    "PrefillOptions",
    "render",
    "render_ablation",
    "render_prefill",
    "run",
    "run_ablation",
    "run_prefill",
]
