"""`moe-edge bench gpu`: upstream and every policy on a GPU, at equal shares of its memory."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from gguf_tools.units import format_size
from orchestrator.cache.files import write_whole
from orchestrator.config import MISSES, Config
from orchestrator.cost import disk
from orchestrator.engine.load import SPARE_BYTES
from orchestrator.errors import ConfigError, MoeEdgeError
from orchestrator.lab.bench.ablation import (
    BASELINE,
    CACHE,
    CACHE_AHEAD,
    COLD,
    MIXED,
    MIXED_AHEAD,
    SKIP_AHEAD,
    paper_rows,
)
from orchestrator.lab.bench.benchmark import Benchmark
from orchestrator.lab.bench.cases import ONE_TIER, Case, global_lru, policies
from orchestrator.lab.bench.job import DECODE, PROMPT, Job, Part, decode, prompt, settle
from orchestrator.lab.bench.loop import Loop, Measured
from orchestrator.lab.bench.models import Note
from orchestrator.lab.bench.options import BenchOptions
from orchestrator.lab.bench.report import (
    MIB,
    MIX,
    NAME,
    at_cap,
    by_cap,
    goal_table,
    moved,
    speeds,
    tokens_of,
)
from orchestrator.lab.bench.rows import Result, case_row, median_ms, median_ratio, named
from orchestrator.lab.table import Column, Row, Table, fixed, percent
from orchestrator.memory.footprint import device_shape, kernel_bytes
from orchestrator.settings import again, setting

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


def _prompt_speed(row: Row) -> float | None:
    """The median of what was copied in a second while a prompt was read."""
    speeds = row.get("prompt_copy_speed_runs")
    return statistics.median_high(speeds) if speeds else None


SPEED_COLUMNS = (
    *speeds(2),
    moved("copied_bytes_per_token"),
    MIX,
    Column("x TPOT", "speedup", fixed(2)),
    Column("x TTFT", "ttft_speedup", fixed(2)),
)
BOUND_COLUMNS = (
    NAME,
    Column("bound", "bound_tpot_ms", fixed(2), "ms"),
    Column("of it", "of_bound", percent(0, " %")),
    Column("bound by", "bound_by", left=True),
    Column("prompt", _prompt_speed, fixed(2, 1e9), "GB/s"),
    Column("of peak", "of_copy_peak", percent(0, " %")),
    Column("x row 1", "over_demand", fixed(2)),
    Column("GPU", "used_bytes", fixed(0, MIB), "MiB"),
    Column("", lambda row: "OVER cap" if row["over_cap"] else None, left=True),
)


def gpu_intro(report: Result) -> list[str]:
    """What was measured and what the columns mean."""
    options, gpu = report["options"], report["gpu"]
    names = ("pinned", "pageable", "read", "compute")
    pinned, pageable, read, compute = (_speeds(gpu["copies"], name) for name in names)
    return [
        f"{gpu['name']}, {format_size(gpu['total_bytes'])}; copies to it {pinned} pinned, "
        f"{pageable} pageable; in place {read}, by the host {compute}",
        f"{options['tokens']} decode steps with the same {tokens_of(report)} tokens for all, "
        f"{options['prompt_tokens']} before them, {options['runs']} runs in turn; x: against "
        f"upstream's best; dymoe at r = {options['retention']}",
        "bound: the slower of computing (all on the GPU) and what tokens missed / those speeds",
        "rows 1 to 6: Table 3 of DyMoE, misses copied",
    ]


def gpu_tables(report: Result) -> list[Table]:
    """Speeds and bounds of each share, and the goals."""
    found = []
    for title, rows in by_cap(report):
        good = [row for row in rows if "error" not in row]
        found += [Table(title, SPEED_COLUMNS, rows), Table("", BOUND_COLUMNS, good)]
    if report["goals"]:
        found.append(
            goal_table(
                "goals",
                report["goals"],
                Column("", at_cap("goal"), left=True),
                Column("measured", "measured", fixed(2)),
                Column("goal", "least", lambda least: f">= {least:.2f}"),
                Column("by", "row", left=True),
            )
        )
    return found


def _speeds(copies: list[Result], name: str) -> str:
    if not copies[0][name]:
        return "refused"
    return ", ".join(f"{each[name] / 1e9:.2f}" for each in copies) + " GB/s"


UPSTREAM, UPSTREAM_CPU = "upstream, n-cpu-moe", "upstream, all on CPU"
UPSTREAM_ON_GPU, MANAGED_ON_GPU = "upstream, all on GPU", "lru, all on GPU"
LRU_WAYS = tuple(how for how in MISSES if how != "auto")
PROBE_TOKENS = 4  # behind a prompt, to see what kernels for single tokens take


@dataclass(frozen=True)
class GpuOptions(BenchOptions):
    """caps: shares of the expert bytes in the best precision that the GPU's memory holds beside
    everything else of the model. device: its name. Raises ConfigError."""

    routing: str = again(BenchOptions, "routing", "zipf")
    caps: tuple[float, ...] = again(
        BenchOptions, "caps", (0.25, 0.5), help="Memory caps in % of the experts."
    )
    prompt_tokens: int = again(BenchOptions, "prompt_tokens", 2048)
    device: str = setting("cuda0", "The GPU.", metavar="NAME")
    layers: int | None = again(
        BenchOptions,
        "layers",
        option=True,
        help="Layers of a random-weight model: qwen3-30b has 48 in full, mixtral 32.",
        shown="6, 4",
    )
    keep: Path | None = setting(
        None,
        "Keeps the figures of each case in this folder, so that a call that was cut off goes on.",
        metavar="DIR",
    )

    @property
    def caps_process(self) -> bool:
        """The GPU's memory is capped, however small the model is."""
        return True

    def parts(self) -> list[Part]:
        """The first prompt finds empty slots and an empty cache of experts in the host's memory,
        where upstream has read all of them: what is compared is the second one."""
        return [
            prompt(self.prompt_tokens, COLD),
            settle(self.warmup, self.max_seconds / 3),
            prompt(self.prompt_tokens),
            decode(self.tokens, self.max_seconds),
        ]


@dataclass(frozen=True, slots=True)
class Room:
    """What the model takes of the GPU beside its experts, in bytes. ours: with our engine; theirs:
    with upstream and all experts on the CPU; layers: the experts of each layer."""

    ours: int
    theirs: int
    layers: tuple[int, ...]

    def vram_bytes(self, share: float) -> int:
        """The memory of the GPU that all have at this share of the experts."""
        return max(self.ours, self.theirs) + int(share * sum(self.layers))

    def cpu_moe(self, share: float) -> int:
        """The smallest N of upstream's --n-cpu-moe N, which leaves the first N layers' experts on
        the CPU, that fits into vram_bytes."""
        left = self.vram_bytes(share) - self.theirs
        n = len(self.layers)
        while n > 0 and self.layers[n - 1] <= left:
            n -= 1
            left -= self.layers[n]
        return n


def gpu_cases(options: GpuOptions, room: Room, gpu: int) -> list[Case]:
    """Everything on the GPU; then, at each share: upstream with as many layers' experts on the
    CPU as do not fit, and with all of them; our null baseline, which gets misses in each way and in
    the one that it chooses; the rows of DyMoE's Table 3, which copies them; every other policy.
    gpu: its number."""
    listed = [
        Case(UPSTREAM_ON_GPU, "upstream", None, "resident", {"gpu": gpu}),
        Case(MANAGED_ON_GPU, "engine", None, "reference", {"policy": "lru", "force_managed": True}),
    ]
    for cap in options.caps:
        fits = room.cpu_moe(cap)
        some, none = ({"gpu": gpu, "cpu_moe": n} for n in (fits, len(room.layers)))
        listed += [
            Case(f"{UPSTREAM} {fits}", "upstream", cap, "upstream", some),
            Case(UPSTREAM_CPU, "upstream", cap, "upstream", none),
            *(getting(global_lru(cap), how, f"lru, {how}") for how in LRU_WAYS),
            *(getting(case, "copy") for case in paper_rows(cap, options.retention, "on")),
            *(case for case in policies(cap, options.retention) if case.name != ONE_TIER),
        ]
    return listed


def getting(case: Case, how: str, name: str | None = None) -> Case:
    """The same, getting its misses in this way."""
    return replace(case, name=name or case.name, settings=case.settings | {"misses": how})


class GpuLoop(Loop[GpuOptions]):
    """The cap is one on the GPU's memory. gpu: what `ask_device` found; room: what the model takes;
    copies: how fast the GPU was copied to before each run."""

    gpu: Result
    room: Room
    shape_of = staticmethod(device_shape)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.copies: list[Result] = []

    def limit_bytes(self, case: Case) -> int | None:
        return None

    def cap_settings(self, case: Case) -> dict[str, Any]:
        settings: dict[str, Any] = {"device": self.options.device}
        return settings if case.cap is None else settings | {"vram": self.room.vram_bytes(case.cap)}

    def job(self, case: Case, number: int) -> Job:
        job = super().job(case, number)
        job.device = self.options.device
        if case.role == "probe":
            tokens = min(self.options.prompt_tokens, self.options.n_ctx - PROBE_TOKENS)
            job.parts = [prompt(tokens), settle(PROBE_TOKENS, self.options.max_seconds)]
            job.warm = False
        return job

    def measure(self, case: Case, number: int) -> Result:
        """As every benchmark, but a case whose figures were kept is not measured again."""
        place = self._place(case, number)
        if place is not None and place.exists():
            kept: Result = json.loads(place.read_text())
            return kept
        found = super().measure(case, number)
        self.note(f"{case.key}: {said(case, found)}")
        if place is not None:
            place.parent.mkdir(parents=True, exist_ok=True)
            write_whole(place, json.dumps(found))
        return found

    def _place(self, case: Case, number: int) -> Path | None:
        """Where the figures of this case are kept: a name for it and for all that it depends on."""
        if self.options.keep is None:
            return None
        digest = hashlib.sha256(f"{case.key} {self.job(case, number).to_json()}".encode())
        return self.options.keep / f"case-{digest.hexdigest()[:20]}.json"

    def measure_room(self, gpu: int | None) -> None:
        """Computes a prompt and some tokens with each engine and few experts on the GPU, to see
        what it takes beside them. A kernel takes memory when it is first launched, so ours gets
        the row with most of them: two precisions and look-ahead, with the largest share; and
        upstream one layer's experts. gpu: its number, None for main memory in the place of one,
        where what is taken is estimated. Raises MoeEdgeError."""
        options, model = self.options, self.model
        rows = {case.name: case for case in paper_rows(1.0, options.retention, "on")}
        slots = int(max(options.caps) * model.tier_bytes[0])
        settings = rows[MIXED_AHEAD].settings | {"expert_ram": slots}
        managed = Case("room", "engine", None, "probe", settings)
        on_cpu = {"gpu": gpu or 0, "cpu_moe": model.n_layers - 1}
        upstream = Case("room", "upstream", None, "probe", on_cpu)
        self.note("what the model takes beside its experts")
        memory = []
        for case in (managed, upstream):
            found = self.measure(case, 0)
            if "error" in found:
                raise MoeEdgeError(f"{self.high}: {found['error']}; or give smaller --caps")
            memory.append(found["memory"])
        layers = tuple(
            sum(tiers[0].expert_bytes * model.n_expert for tiers in kinds if tiers[0])
            for kinds in model.slices
        )
        config = Config.build(model=self.high, ctx=options.n_ctx, ubatch=options.n_ubatch)
        kernels = kernel_bytes(model, config, options.n_ctx, memory[0]["flash"])
        ours, theirs = memory[0]["fixed"], memory[1]["llama"] + kernels
        if gpu is not None:  # our plan refuses what is less than its estimate
            experts = memory[0]["planned"] - ours
            ours = max(ours, memory[0]["used"] - experts) + SPARE_BYTES
            theirs = max(theirs, memory[1]["used"]) + SPARE_BYTES - layers[-1]
        self.room = Room(ours, theirs, layers)

    def bandwidth(self, number: int) -> disk.Bandwidth:
        self.copies.append(ask_device(self.options.device)["copies"])
        return super().bandwidth(number)


def said(case: Case, found: Result) -> str:
    """What a process found, in short."""
    if "error" in found or case.role == "probe":
        return str(found.get("error", "loaded"))
    row = case_row(case, [found], None)
    return f"{row['tpot_ms_p50']:.2f} ms per token, first token after {row['ttft_ms']:.1f} ms"


def ask_device(name: str) -> Result:
    """A GPU, as a process of its own finds it: this one shall take nothing of its memory. Raises
    ConfigError where there is none."""
    job = Job("device", "", None, {}, n_ctx=0, n_ubatch=0, threads=1, parts=[], seed=0, device=name)
    found = GpuLoop._spawn(job, None)
    if "error" in found:
        raise ConfigError(found["error"])
    return found


class Gpu(Benchmark[GpuLoop]):
    """A GPU's memory in shares of the experts."""

    options = GpuOptions

    def prepare(self, options: BenchOptions, note: Note) -> GpuLoop:
        """Raises ConfigError without a GPU, before a model is made."""
        if not isinstance(options, GpuOptions):
            raise TypeError("the options are those of another benchmark")
        gpu = ask_device(options.device)
        loop = GpuLoop.prepare(options, note)
        loop.gpu = gpu
        loop.measure_room(gpu["index"])
        return loop

    def cases(self, loop: GpuLoop) -> list[Case]:
        return gpu_cases(loop.options, loop.room, loop.gpu["index"] or 0)

    def figures(self, loop: GpuLoop, measured: Measured) -> Result:
        rows = [gpu_row(loop, case, runs) for case, runs in measured.each()]
        add_ratios(rows)
        add_bounds(rows, loop.copies, [each.bytes_per_s for each in measured.bandwidths])
        return {"gpu": loop.gpu | {"copies": loop.copies}, "cases": rows}

    def goals(self, loop: GpuLoop, rows: Sequence[Result]) -> list[Result]:
        options = loop.options
        return gpu_goals(rows, skewed=not options.trained and options.routing != "uniform")

    def intro(self, report: Result) -> list[str]:
        return gpu_intro(report)

    def tables(self, report: Result) -> list[Table]:
        return gpu_tables(report)


def gpu_row(loop: GpuLoop, case: Case, runs: Sequence[Result]) -> Result:
    """The figures of one case: those of every benchmark, and the GPU's memory and copies."""
    row = case_row(case, runs, None)
    row["vram_bytes"] = None if case.cap is None else loop.room.vram_bytes(case.cap)
    if "error" in row:
        return row
    if case.role == "reference" and row["hit_rate"] < 1:
        return {key: row[key] for key in ("name", "cap", "role", "vram_bytes")} | {
            "error": "not all experts fit the GPU"
        }
    row["memory"] = runs[0]["memory"]
    row["used_bytes"] = max(each["memory"]["used"] for each in runs)
    row["over_cap"] = row["vram_bytes"] is not None and row["used_bytes"] > row["vram_bytes"]
    return row | streamed(runs)
