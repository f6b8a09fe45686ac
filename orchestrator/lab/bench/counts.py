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
TESTS = ROOT / "tests/native/cuda"  # this folder exists only in a source checkout
# A model with the number of experts of Qwen3-30B, but with the smallest possible matrices. The
# emulated GPU computes on the CPU, and the size of a matrix does not change the number of launches.
SHAPE = replace(synthetic.preset("tiny-qwen3moe"), n_layer=3, n_expert=128, n_expert_used=8)
SHARE = 0.25  # fraction of the experts that fits on the GPU
PROMPT_TOKENS, SETTLE_STEPS, STEPS = 4, 2, 2
SECONDS = 1800.0  # time limit of a case, long because the emulated GPU is slow
UPSTREAM = "upstream, all on GPU"
STORE = {
    "transitions": "transitions",
    "table writes": "table_writes",
    "locks": "locks",
    "disk bytes": "bytes",
}
FIGURES = (*COUNTS, *STORE)


def cases(model: ExpertModel, retention: float) -> list[Case]:
    """Return the benchmark cases (systems with settings) whose GPU operations are counted.

    In the first cases, the GPU holds all experts. These are upstream llama.cpp, our engine without
    an active policy, and a policy that decides in each layer, with and without prefetching. In the
    other cases, the GPU holds at most a quarter of the experts. These are the six systems of Table
    3 of the DyMoE paper, and the policy dynaexq.

    retention: the fraction of the experts that the policy dymoe keeps in the high precision.
    """
    everything = [
        Case(UPSTREAM, "upstream", settings={"gpu": 0}),
        replace(REFERENCE, name=f"{MANAGED}, static tables"),
        *(
            Case(
                f"--policy dymoe --prefetch {ahead}, all experts on the GPU",
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
    """Return the job that tells a child process how to measure a benchmark case.

    A case is one system with its settings. `high` and `low` are the model files in the two
    precisions.
    """
    parts: list[Part] = [
        prompt(PROMPT_TOKENS),
        settle(SETTLE_STEPS, SECONDS),
        decode(STEPS, SECONDS),
    ]
    settings = dict(case.settings)
    if case.system == "engine":
        settings |= {"device": "cuda0", "misses": "copy", "io_threads": 1}
        if case.one_token:
            settings["expert_ram"] = no_hits_slot_bytes(model)
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


def no_hits_slot_bytes(model: ExpertModel) -> int:
    """Return a memory size for experts, in bytes, so small that the cache never has a hit.

    The memory holds the experts that a token uses in two layers. All layers share it, and the model
    has three layers (see SHAPE). So when the next token comes to a layer, experts of the two other
    layers have replaced the experts of this layer.
    """
    share = model.n_expert_used / model.n_expert / model.n_layers
    return 2 * int(share * model.tier_bytes[0])


def figures(case: Case, run: Result, n_layers: int) -> Result:
    """Return the counts of a benchmark case as a table row: a dict from name to number.

    The numbers are GPU operations, such as kernel launches, and bytes read from disk. Each is a
    mean per layer and decoded token.

    - case: the measured system with its settings. Its name is in the row.
    - run: the measurements of the case. If the case failed, they have the key "error", and the row
      has the error instead of numbers.
    """
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
    """Make child processes that start inside the `with` block use the emulated GPU.

    The emulated GPU computes on the CPU and counts its operations. `library` is its compiled
    library.
    """
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
    """Compile the emulated GPU if necessary, and return the path of its library.

    The emulated GPU is a library that computes GPU operations on the CPU. Raises MoeEdgeError if it
    cannot be compiled.
    """
    if not TESTS.is_dir():
        raise ConfigError(
            "--emulated needs a source checkout, whose tests contain the emulated GPU"
        )
    command = [sys.executable, "-m", "tests.native.cuda.emulation"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise MoeEdgeError(
            f"the library that emulates a GPU (--emulated) cannot be compiled: {lines[-1]}"
        )
    return Path(done.stdout.strip().splitlines()[-1])


def count_rows(
    library: Path, retention: float, note: Note, only: Sequence[str] = ()
) -> list[Result]:
    """Count the GPU operations of each benchmark case in its own process, and return the results.

    The result has a dict for each case, with its operations per layer and decoded token.

    - library: the library of the emulated GPU, which computes on the CPU.
    - retention: the fraction of the experts that the policy dymoe keeps in the high precision.
    - note: receives the name of each case.
    - only: count only cases whose names contain one of these words; empty for all cases.
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
    """Count the GPU operations per token of llama.cpp and our engine, and return the report.

    The GPU is emulated by a library that computes on the CPU. The report has one table, with a row
    for each system and its settings.

    - retention: the fraction of the experts that the policy dymoe keeps in the high precision.
    - note: receives progress messages.

    Raises MoeEdgeError if the emulated GPU cannot be compiled.
    """
    rows = count_rows(build_emulation(), retention, note)
    columns = (NAME, *(Column(name, name, lambda figure: f"{figure:g}") for name in FIGURES))
    title = (
        f"GPU operations per layer and token of a model with {SHAPE.n_layer} layers of "
        f"{SHAPE.n_expert} experts"
    )
    heading = [
        f"The model has {SHAPE.n_layer} layers with {SHAPE.n_expert} experts each. A token uses "
        f"{SHAPE.n_expert_used} experts of each layer. All matrices are 256 x 256.",
        f"The table counts GPU operations (such as kernel launches, waits and copies) of {STEPS} "
        f"decode steps on the emulated GPU, after a warm-up of {PROMPT_TOKENS + SETTLE_STEPS} "
        f"tokens.",
        "Each number is the count of all decode steps, divided by the number of decoded tokens and "
        "by the number of layers. Operations of the embedding and of the output are counted, too.",
        f"Rows 1 to 6 are those of Table 3 of the DyMoE paper, with {SHARE:.0%} of the experts on "
        f"the GPU.",
        f"Rows 1 to 6 copy missing experts from host memory, which holds all experts in {HIGH} and "
        f"in {LOW}.",
        'Rows with "4/2" in their name: experts have 4 or 2 bits per weight.',
        'Rows with "4/0" in their name: experts have 4 bits per weight or are skipped.',
        f"On average, the policy dymoe keeps {retention:.1%} of the experts in the high precision "
        f"(--retention).",
    ]
    return Report(heading, [Table(title, columns, rows)], [])
