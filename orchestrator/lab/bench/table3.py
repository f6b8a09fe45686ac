"""Table 3 of the DyMoE paper at full depth: `moe-edge bench gpu --table3`.

The rows are measured on all 48 layers of Qwen3-30B's shape, with random weights in memory. The
figures of a row are printed as soon as it ends, next to the paper's ratios.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gguf_tools.experts import ExpertModel
from orchestrator.cost import losses
from orchestrator.lab.bench.cases import (
    CACHE,
    CACHE_AHEAD,
    MIXED_AHEAD,
    ON_DEMAND,
    PAPER_RATIOS,
    REFERENCE,
    SKIP_AHEAD,
    Case,
    paper_rows,
    policies,
)
from orchestrator.lab.bench.models import DEMO_MODEL
from orchestrator.lab.bench.rows import HIT, NAME, Result, add_ratio, moved, step
from orchestrator.lab.table import Column, Row, fixed
from orchestrator.native.abi import WAITS
from orchestrator.plan.machine import probe

# The options that --table3 changes, unless they are given.
DEFAULTS: dict[str, Any] = {
    "shape": "qwen3-30b",
    "layers": 48,
    "caps": (0.25, 0.5, 0.75),
    "runs": 1,
    "tokens": 64,
    "prompt_tokens": 512,
    "max_seconds": 20.0,
}
# The second prompt length, as a multiple of the first: 2,048 tokens.
LONGER, LONG = 4, "long prompt"
# All rows are measured up to this share of the experts on the GPU, and FEW rows above it.
ALL_ROWS_CAP = 0.25
FEW = (CACHE, CACHE_AHEAD, MIXED_AHEAD, SKIP_AHEAD)
FLOOR = "floor 4/0"
ASKED_ON_GPU = "policy asked, all on GPU"
# Time limit for loading the model of a row.
START_SECONDS = 120.0
# A file system in memory, and the bytes that must stay free in memory.
MEMORY_FOLDER, SPARE_BYTES = Path("/dev/shm"), 8 << 30
# The model's experts are in this folder and in the host tier, so they take their size twice.
COPIES = 2


def intro(short: int, long: int) -> list[str]:
    """Return paragraphs for the report that explain the columns of the table.

    `short` and `long` are the lengths of the two prompts, in tokens.
    """
    return [
        f'The columns "{short}" and "{long}" are the times to read prompts of {short} and {long} '
        f"tokens.",
        f'The column "x TPOT" is the speed-up of decoding over "{ON_DEMAND}".',
        f'The column "x TTFT" is the speed-up of reading a prompt of {short} tokens over '
        f'"{ON_DEMAND}".',
        'Each column "paper" has the values of the DyMoE paper for the column to its left, with 16 '
        "and 24 GB of GPU memory (Mixtral-8x7B, RTX 3090, PCIe 3.0).",
        "All layers of the measured model have the same random experts.",
    ]


def on_gpu() -> list[Case]:
    """Return the two benchmark cases in which our engine has all experts on the GPU.

    In the first case, the policy is not called during decoding. In the second case, the policy is
    called for each layer.
    """
    settings = {"policy": "dymoe", "retention": 1.0, "prefetch": "off", "force_managed": True}
    return [
        replace(REFERENCE, name="static tables, all on GPU"),
        Case(ASKED_ON_GPU, "engine", settings=settings),
    ]


def cases_under(cap: float, first: bool, retention: float, table: Path) -> list[Case]:
    """Return the benchmark cases of our engine for one cap on GPU memory.

    A case is a policy with its settings. Row n means the case that reproduces row n of Table 3 of
    the DyMoE paper (see `paper_rows`).

    - cap: the fraction of the experts that fits on the GPU.
    - first: whether `cap` is the first cap of the benchmark.
    - retention: the fraction of experts that DyMoE keeps in high precision.
    - table: a file with each expert's error in each precision, which the policy floor needs.

    Up to a cap of 0.25, the result has rows 1 to 6, a case of the policy dynaexq, and a case of the
    policy floor. Above 0.25, the result has rows 2, 3, 5 and 6. If `first` is True, the result
    always has row 1, too.
    """
    paper = paper_rows(cap, retention)
    if cap > ALL_ROWS_CAP:
        return [case for case in paper if case.name in FEW or (first and case.name == ON_DEMAND)]
    *_, dynaexq = policies(cap, retention)
    settings = {"policy": "floor", "losses": str(table)}
    return [*paper, dynaexq, Case(FLOOR, "engine", cap, "", settings)]


def write_losses(path: Path, high: Path) -> Path:
    """Write a loss table for a random-weight model to the file `path`, and return `path`.

    A loss table has the error of each expert's output in each precision. The errors are not
    measured. They are copied from the loss table of the trained demo model, from a layer at the
    same relative depth.

    - high: file of the random-weight model.

    Raises LossTableError if the demo model has no loss table.
    """
    table = losses.load(losses.default_path(DEMO_MODEL), None)
    with ExpertModel.open(high) as model:
        layers = np.linspace(0, len(table.counts) - 1, model.n_layers).round().astype(int)
        at = np.ix_(layers, np.arange(model.n_expert) % table.counts.shape[1])
        fit = table.fit
        stretched = replace(
            table,
            loss=table.loss[at],
            power=table.power[at],
            counts=table.counts[at],
            gates=None if table.gates is None else table.gates[at],
            fit=fit and fit._replace(factors=tuple(fit.factors[layer] for layer in layers)),
        )
        losses.save(path, model, stretched)
    return path


def memory_folder(n_bytes: int) -> Path | None:
    """Return a folder in main memory for model files of n_bytes bytes in total.

    Returns None if main memory is too small. Main memory must have space for twice this size,
    because the measured engine also keeps a copy of the experts in main memory.
    """
    folder = MEMORY_FOLDER / "moe-edge-bench"
    there = sum(path.stat().st_size for path in folder.glob("*.gguf"))
    try:
        free = shutil.disk_usage(MEMORY_FOLDER).free + there
    except OSError:
        return None
    room = probe().memory_bytes + there
    return folder if n_bytes <= free and COPIES * n_bytes + SPARE_BYTES <= room else None


def paper_text(row: Row, part: str) -> str | None:
    """Format two speed-ups that the DyMoE paper has for a row of its Table 3, such as "1.88/2.20".

    They are the speed-ups on GPUs with 16 and 24 GB, relative to the table's first row, which loads
    experts on demand. Returns None if the paper has none for the row.

    - row: a row of our benchmark, which has the same name as the row of the paper.
    - part: "tpot" (time per output token) or "ttft" (time to the first token).
    """
    ratios = PAPER_RATIOS.get(row["name"])
    return None if ratios is None else "/".join(f"{each:.2f}" for each in getattr(ratios, part))


def columns(prompt_tokens: int) -> tuple[Column, ...]:
    """Return the columns of the table that `moe-edge bench gpu --table3` prints.

    They include the time per token, the hit rate, and speed-ups next to those of the DyMoE paper.
    Two more columns have the times to read a short prompt of `prompt_tokens` tokens and a long
    prompt, which is 4 times as long.
    """
    return (
        NAME,
        step(2),
        Column("p99", "tpot_ms_p99", fixed(2), "ms"),
        Column(f"{prompt_tokens}", "ttft_ms", fixed(0), "ms"),
        Column(f"{LONGER * prompt_tokens}", "long_ms", fixed(0), "ms"),
        HIT,
        moved("copied_bytes_per_token"),
        Column("x TPOT", "speedup_tpot", fixed(2)),
        Column("paper", lambda row: paper_text(row, "tpot")),
        Column("x TTFT", "speedup_ttft", fixed(2)),
        Column("paper", lambda row: paper_text(row, "ttft")),
    )


def add_over_row_1(rows: Sequence[Result]) -> None:
    """Add to each row of the benchmark its speed-ups over the row "load on demand".

    The key "speedup_tpot" has the speed-up of the time per output token, and "speedup_ttft" of the
    time to the first token.

    The row "load on demand" reproduces row 1 of Table 3 of the DyMoE paper. It loads each expert
    again for each token. Its speed therefore does not depend on the memory cap, and the rows of all
    caps are compared with it.
    """
    base = [row for row in rows if row["name"] == ON_DEMAND]
    add_ratio(rows, "speedup_tpot", base)
    add_ratio(rows, "speedup_ttft", base, "ttft_ms_runs")


def waits_text(row: Row) -> str:
    """Format how long the decoding thread waited, in microseconds per layer and token, by cause.

    Two of the causes are reads from disk and copies to the GPU.
    """
    return ", ".join(f"{cause} {row[f'{cause} wait']:.0f}" for cause in WAITS)


def line(case: Case, row: Row, prompt_tokens: int) -> str:
    """Return the measurements of a benchmark case as one line of text.

    A case is one system under one memory cap. The text has the time per token, the times to read a
    short and a long prompt, and the hit rate. If the case failed, the text has the error instead.

    - row: the metrics of the case, or its error.
    - prompt_tokens: length of the short prompt.
    """
    if "error" in row:
        return f"{case.key}: {row['error']}"
    found = (
        f"{case.key}: decoding {row['tpot_ms_p50']:.2f} ms per token (p99 "
        f"{row['tpot_ms_p99']:.2f} ms), prompt of {prompt_tokens} tokens {row['ttft_ms']:.0f} ms, "
        f"prompt of {LONGER * prompt_tokens} tokens {row.get('long_ms', math.nan):.0f} ms"
    )
    if row.get("hit_rate") is not None:
        found = (
            f"{found}. Requested experts that were on the GPU: {row['hit_rate']:.1%}. Copied to "
            f"the GPU: {row['copied_bytes_per_token'] / 1e6:.0f} MB per token. "
            f"Time that decoding waited, in us per layer and token, by cause: {waits_text(row)}"
        )
    return found
