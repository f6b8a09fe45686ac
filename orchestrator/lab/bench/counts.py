"""`moe-edge bench gpu --emulated --counts`: GPU operations per decode step.

The emulated GPU has no meaningful speed, but it counts kernel launches, host waits and copies. The
store counts its transitions, its table writes and the times that the decoding thread takes its
lock. Reads and copies run sequentially in this mode, so every run gives the same counts
(`tests/native/cuda/counts.json`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from gguf_tools import synthetic
from gguf_tools.experts import ExpertModel
from orchestrator.errors import ConfigError, MoeEdgeError
from orchestrator.lab.bench.cases import MANAGED, REFERENCE, Case, paper_rows, policies
from orchestrator.lab.bench.child import (
    BACKEND,
    COUNTS,
    DECODE,
    Job,
    Part,
    decode,
    longest_context,
    prompt,
    settle,
)
from orchestrator.lab.bench.models import HIGH, LOW, Note
from orchestrator.lab.bench.rows import NAME, Result, named
from orchestrator.lab.children import run_child
from orchestrator.lab.table import Column, Report, Table

ROOT = Path(__file__).resolve().parents[3]
TESTS = ROOT / "tests/native/cuda"  # exists only in a checkout
# The number of experts of Qwen3-30B, with the smallest matrices that the types allow. Kernels run
# on the CPU, and the size of a matrix does not change the number of launches.
SHAPE = replace(synthetic.preset("tiny-qwen3moe"), n_layer=3, n_expert=128, n_expert_used=8)
SHARE = 0.25  # of the experts on the GPU
PROMPT_TOKENS, SETTLE_STEPS, STEPS = 4, 2, 2
SECONDS = 1800.0  # the emulated GPU is slow
UPSTREAM = "upstream, all on GPU"
STORE = {
    "transitions": "transitions",
    "table writes": "table_writes",
    "locks": "locks",
    "disk bytes": "bytes",
}
FIGURES = (*COUNTS, *STORE)


def cases(model: ExpertModel, retention: float) -> list[Case]:
    """Return the counted cases.

    With everything on the GPU: upstream, static tables, and a policy hook that is active in each
    layer, without and with look-ahead. With a share of the experts on the GPU: the rows of DyMoE's
    Table 3, and DynaExq.
    """
    everything = [
        Case(UPSTREAM, "upstream", settings={"gpu": 0}),
        replace(REFERENCE, name=f"{MANAGED}, static tables"),
        *(
            Case(
                f"all on GPU, policy asked, look-ahead {ahead}",
                "engine",
                settings={"policy": "dymoe", "retention": 1.0, "prefetch": ahead},
            )
            for ahead in ("off", "on")
        ),
    ]
    *_, dynaexq = policies(SHARE, retention)
    slots = int(SHARE * model.tier_bytes[0])
    capped = [
        case if case.one_token else replace(case, settings=case.settings | {"expert_ram": slots})
        for case in (*paper_rows(SHARE, retention), dynaexq)
    ]
    return everything + capped


def job(case: Case, high: Path, low: Path, model: ExpertModel) -> Job:
    """Return the job for the process of a case."""
    parts: list[Part] = [
        prompt(PROMPT_TOKENS),
        settle(SETTLE_STEPS, SECONDS),
        decode(STEPS, SECONDS),
    ]
    settings = dict(case.settings)
    if case.system == "engine":
        settings |= {"device": "cuda0", "misses": "copy", "io_threads": 1}
        if case.one_token:
            settings["expert_ram"] = token_bytes(model)
    return Job(
        system=case.system,
        model=str(high),
        low=str(low) if settings.get("low_tier") == LOW else None,
        settings=settings,
        n_ctx=longest_context(parts),
        n_ubatch=PROMPT_TOKENS,
        threads=1,
        parts=parts,
        seed=0,
        warm=case.system == "engine" and case.cap is None,
        warm_host=case.system == "engine" and case.cap is not None,
        counts=True,
    )


def token_bytes(model: ExpertModel) -> int:
    """Return the bytes of the expert slots that one token needs in one layer."""
    share = model.n_expert_used / model.n_expert / model.n_layers
    return 2 * int(share * model.tier_bytes[0])


def figures(case: Case, run: Result, n_layers: int) -> Result:
    """Return the counts of one case per layer and decoded token."""
    row: Result = {"name": case.name}
    if "error" in run:
        return row | {"error": run["error"]}
    (part,) = named(run, DECODE)
    found = dict(part["counts"])
    if "store" in part:
        found |= {name: part["store"][key] for name, key in STORE.items()}
    shares = {name: found[name] / part["tokens"] / n_layers for name in FIGURES if name in found}
    return row | {name: round(share, 3) for name, share in shares.items()}


@contextmanager
def emulated_gpu(library: Path) -> Iterator[None]:
    """Make the emulated GPU and its counters available to child processes inside the block."""
    path = os.pathsep.join(filter(None, (str(TESTS / "site"), os.environ.get("PYTHONPATH", ""))))
    added = {BACKEND: str(library), "PYTHONPATH": path, "MOE_EMU_COUNT": "1"}
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def build_emulation() -> Path:
    """Compile the emulated GPU if necessary, and return its library. Raises MoeEdgeError."""
    if not TESTS.is_dir():
        raise ConfigError(
            "--emulated needs a source checkout, whose tests contain the emulated GPU"
        )
    command = [sys.executable, "-m", "tests.native.cuda.emulation"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise MoeEdgeError(f"the emulated GPU cannot be built: {lines[-1]}")
    return Path(done.stdout.strip().splitlines()[-1])


def count_rows(
    library: Path, retention: float, note: Note, only: Sequence[str] = ()
) -> list[Result]:
    """Count each case in its own process.

    `only` selects the cases whose names contain one of these words; empty selects all.
    """
    rows: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="moe-edge-counts-") as folder, emulated_gpu(library):
        high, low = (
            synthetic.write(Path(folder) / f"{tier}.gguf", SHAPE, tiers=(tier,), routing="zipf")
            for tier in (HIGH, LOW)
        )
        with ExpertModel.open(high) as model:
            for case in cases(model, retention):
                if only and not any(word in case.name for word in only):
                    continue
                note(case.name)
                sent: Any = job(case, high, low, model)
                run = run_child("orchestrator.lab.bench.child", sent, SECONDS)
                rows.append(figures(case, run, model.n_layers))
    return rows


def count(retention: float, note: Note) -> Report:
    """Count all cases on the emulated GPU and return the report. Raises MoeEdgeError."""
    rows = count_rows(build_emulation(), retention, note)
    columns = (NAME, *(Column(name, name, lambda figure: f"{figure:g}") for name in FIGURES))
    title = f"per layer and token; {SHAPE.n_layer} layers, {SHAPE.n_expert} experts"
    heading = [
        f"{SHAPE.n_layer} layers of {SHAPE.n_expert} experts, top-{SHAPE.n_expert_used}, 256 x 256 "
        f"on the emulated GPU; {STEPS} decode steps after {PROMPT_TOKENS + SETTLE_STEPS}",
        f"rows 1 to 6: Table 3 of DyMoE, {SHARE:.0%} of the experts on the GPU, dymoe at r = "
        f"{retention}; before the first step, host memory holds the experts in both precisions",
        "counts of the embedding and output are spread over the layers; misses are copied",
    ]
    return Report(heading, [Table(title, columns, rows)], [])
