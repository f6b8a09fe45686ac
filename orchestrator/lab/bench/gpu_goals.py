"""What the figures of a GPU are compared with: upstream, the bound, the paper, our goals."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise

from orchestrator.config import MISSES
from orchestrator.lab.bench.ablation import (
    BASELINE,
    CACHE,
    CACHE_AHEAD,
    MIXED,
    MIXED_AHEAD,
    SKIP_AHEAD,
)
from orchestrator.lab.bench.job import DECODE, PROMPT
from orchestrator.lab.bench.rows import Result, median_ms, median_ratio, named

ONE_PRECISION = ("lru", *(f"lru, {how}" for how in MISSES), CACHE, CACHE_AHEAD)
TWO_PRECISIONS = ("dymoe 4/2", MIXED, MIXED_AHEAD)
PAPER = (BASELINE, CACHE, CACHE_AHEAD, MIXED, MIXED_AHEAD, SKIP_AHEAD)
# Table 3 of DyMoE: the least and the greatest speed-up of the whole system over row 1 in TPOT, of
# row 5 with little memory and of row 6 with more.
PAPER_RATIOS = (2.43, 4.26)


def streamed(runs: Sequence[Result]) -> Result:
    """What was copied to the GPU by each run: per decoded token, and while the prompt was read."""
    if not all("store" in part for run in runs for part in run["parts"]):
        return {}

    def total(run: Result, name: str, key: str) -> float:
        return float(sum(part["store"][key] for part in named(run, name)))

    tokens = [sum(part["tokens"] for part in named(run, DECODE)) for run in runs]
    seconds = [ms / 1e3 for ms in median_ms(runs, PROMPT)]
    copied, needed, in_place, by_host = (
        [total(run, DECODE, key) / n for run, n in zip(runs, tokens, strict=True)]
        for key in ("copied_bytes", "needed_copied_bytes", "in_place_bytes", "host_computed_bytes")
    )
    prompts = [total(run, PROMPT, "copied_bytes") for run in runs]
    return {
        "copied_bytes_per_token": statistics.median(copied),
        "needed_copied_bytes_per_token_runs": needed,
        "in_place_bytes_per_token_runs": in_place,
        "host_computed_bytes_per_token_runs": by_host,
        "prompt_copied_bytes_runs": prompts,
        "prompt_copy_speed_runs": [n / s for n, s in zip(prompts, seconds, strict=True)],
    }


def add_ratios(rows: Sequence[Result]) -> None:
    """Speed and first token of each row against upstream's better one at the same share, run by
    run; of the managed path with everything there against upstream's; and of the rows of the
    paper against load on demand."""
    good = [row for row in rows if "error" not in row]
    for row in good:
        same = [each for each in good if each["cap"] == row["cap"]]
        role = "resident" if row["cap"] is None else "upstream"
        others = [each for each in same if each["role"] == role]
        if others and row["role"] != role:
            _add_ratio(row, others, "speedup", "ttft_speedup")
        demand = [each for each in same if each["name"] == BASELINE]
        if demand and row["role"] != role:
            _add_ratio(row, demand, "over_demand", "ttft_over_demand")


def _add_ratio(row: Result, others: Sequence[Result], tpot: str, ttft: str) -> None:
    for name, key in ((tpot, "tpot_ms_p50_runs"), (ttft, "ttft_ms_runs")):
        best = [min(each) for each in zip(*(other[key] for other in others), strict=True)]
        row[name] = median_ratio(best, row[key])


def add_bounds(rows: Sequence[Result], copies: Sequence[Result], reads: Sequence[float]) -> None:
    """The bound of a token of each row and how much of it was reached, run by run; and the share
    of the copies' peak that a prompt reached.

    max(computing, bytes missed / bandwidth of where they come from): computing is the managed
    path with everything on the GPU, 0 where that did not fit; what was read in place comes over
    the same link as copies, what the host computed does not. copies: the speeds of
    native.Bandwidths, reads: bytes per second of the disk; one for each run.
    """
    good = [row for row in rows if "error" not in row]
    managed = [row["tpot_ms_p50_runs"] for row in good if row["role"] == "reference"]
    peaks = [each["pinned"] or each["pageable"] for each in copies]
    for row in good:
        if "needed_copied_bytes_per_token_runs" not in row or row["cap"] is None:
            continue
        compute = managed[0] if managed else [0.0] * len(peaks)
        waits = [_wait_ms(row, i, copies[i], peaks[i], reads[i]) for i in range(len(peaks))]
        bounds = [max(each) for each in zip(compute, waits, strict=True)]
        by_misses = statistics.median(waits) > statistics.median(compute)
        row["bound_tpot_ms"] = statistics.median(bounds)
        row["bound_by"] = "misses" if by_misses else "computing"
        row["of_bound"] = median_ratio(bounds, row["tpot_ms_p50_runs"])
        row["of_copy_peak"] = median_ratio(row["prompt_copy_speed_runs"], peaks)


def _wait_ms(row: Result, run: int, speeds: Result, link: float, disk: float) -> float:
    """What a token of this run missed, each part at the peak of its way, at the same time."""
    by_host = row["host_computed_bytes_per_token_runs"][run]
    in_place = row["in_place_bytes_per_token_runs"][run] - by_host
    over_link = row["needed_copied_bytes_per_token_runs"][run] / link
    over_link += in_place / (speeds["read"] or link)
    computed = by_host / speeds["compute"] if by_host else 0.0
    read = row["needed_bytes_per_token_runs"][run] / disk
    return float(1e3 * max(over_link, computed, read))


def gpu_goals(rows: Sequence[Result], skewed: bool) -> list[Result]:
    """Each goal with what was measured: {"cap", "goal", "least", "measured", "row", "met"}; met is
    None where it was not measured. skewed: the routing is, which the goals for speed ask for."""
    good = [row for row in rows if "error" not in row]
    found = []

    def judge(cap: float | None, goal: str, least: float, key: str, names: Sequence[str]) -> None:
        known = [
            (row[key], row["name"])
            for row in good
            if row["cap"] == cap and key in row and (not names or row["name"] in names)
        ]
        measured, name = max(known, default=(None, None))
        met = None if measured is None else measured >= least
        found.append(
            {
                "cap": cap,
                "goal": goal,
                "least": least,
                "measured": measured,
                "row": name,
                "met": met,
            }
        )

    managed = [row["name"] for row in rows if row["role"] == "reference"]
    judge(None, "TPOT, all on the GPU, over upstream's", 0.97, "speedup", managed)
    caps = sorted({row["cap"] for row in rows if row["cap"] is not None})
    for cap in caps:
        if skewed:
            judge(cap, "TPOT over upstream's best, one tier", 2.0, "speedup", ONE_PRECISION)
            judge(cap, "TPOT over upstream's best, 4/2", 3.0, "speedup", TWO_PRECISIONS)
        ours = [row["name"] for row in rows if row["role"] == ""]
        judge(cap, "TTFT over upstream's best", 2.0, "ttft_speedup", ours)
        judge(cap, "copies of a prompt, of the pinned peak", 0.9, "of_copy_peak", ours)
    for cap, least, name in zip(
        (caps[0], caps[-1]), PAPER_RATIOS, (MIXED_AHEAD, SKIP_AHEAD), strict=True
    ):
        judge(cap, "TPOT over load on demand", least, "over_demand", (name,))
    for cap in caps:
        found.append(_order(good, cap))
    return found


def _order(rows: Sequence[Result], cap: float) -> Result:
    """Whether each row of the paper's table is faster than the one before, as there."""
    times = {row["name"]: row["tpot_ms_p50"] for row in rows if row["cap"] == cap}
    known = [times[name] for name in PAPER if name in times]
    met = None
    if len(known) == len(PAPER):
        met = all(after <= before for before, after in pairwise(known))
    goal = "TPOT of the paper's rows in its order"
    return {"cap": cap, "goal": goal, "least": None, "measured": None, "row": None, "met": met}
