"""Side-by-side measurements under memory caps, against upstream and against the bound."""

from orchestrator.bench.ablation import AblationOptions, render_ablation, run_ablation
from orchestrator.bench.batch import BatchOptions, render_batch, run_batch
from orchestrator.bench.gpu import GpuOptions, run_gpu
from orchestrator.bench.gpu_report import render_gpu
from orchestrator.bench.plan import BenchOptions
from orchestrator.bench.prefill import PrefillOptions, render_prefill, run_prefill
from orchestrator.bench.report import render
from orchestrator.bench.run import run
from orchestrator.bench.topics import TopicOptions, run_topics
from orchestrator.bench.topics_report import render_topics

__all__ = [
    "AblationOptions",
    "BatchOptions",
    "BenchOptions",
    "GpuOptions",
    "PrefillOptions",
    "TopicOptions",
    "render",
    "render_ablation",
    "render_batch",
    "render_gpu",
    "render_prefill",
    "render_topics",
    "run",
    "run_ablation",
    "run_batch",
    "run_gpu",
    "run_prefill",
    "run_topics",
]
