"""`moe-edge bench gpu`: upstream and every policy on a GPU, at equal shares of its memory."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gguf_tools.units import format_size
from orchestrator.allocation.slots import ModelShape
from orchestrator.cache.files import write_whole
from orchestrator.config import MISSES
from orchestrator.cost import disk
from orchestrator.errors import ConfigError, MoeEdgeError
from orchestrator.lab.bench.ablation import AblationOptions, add_over_demand
from orchestrator.lab.bench.benchmark import Benchmark
from orchestrator.lab.bench.cases import MIXED_AHEAD, REFERENCE, Case, paper_rows, policies
from orchestrator.lab.bench.child import Job, prompt, settle
from orchestrator.lab.bench.counts import count
from orchestrator.lab.bench.models import Note
from orchestrator.lab.bench.options import BenchOptions
from orchestrator.lab.bench.rows import (
    HIT,
    MIX,
    NAME,
    TTFT,
    Result,
    add_bound,
    add_ratio,
    best_runs,
    caps_of,
    case_row,
    good,
    moved,
    per_token,
    step,
)
from orchestrator.lab.table import Column, Report, fixed, percent
from orchestrator.memory.footprint import model_shape
from orchestrator.native.abi import WAITS
from orchestrator.runtime.load import SPARE_BYTES
from orchestrator.settings import again, setting

UPSTREAM, UPSTREAM_CPU = "upstream, n-cpu-moe", "upstream, all on CPU"
UPSTREAM_ON_GPU, MANAGED_ON_GPU = "upstream, all on GPU", "lru, all on GPU"
LRU_WAYS = tuple(how for how in MISSES if how != "auto")
PROBE_TOKENS = 4  # behind a prompt, to see what kernels for single tokens take


@dataclass(frozen=True)
class GpuOptions(AblationOptions):
    """caps: shares of the expert bytes in the best precision that the GPU's memory holds beside
    everything else of the model. device: its name. Raises ConfigError."""

    caps: tuple[float, ...] = again(
        BenchOptions, "caps", (0.25, 0.5), help="Memory caps in % of the experts."
    )
    tokens: int = again(BenchOptions, "tokens")
    prompt_tokens: int = again(BenchOptions, "prompt_tokens", 1024)
    runs: int = again(BenchOptions, "runs")
    turns: int = again(AblationOptions, "turns", 1, option=False)
    device: str = setting("cuda0", "The GPU.", metavar="NAME")
    layers: int | None = again(
        BenchOptions,
        "layers",
        help="Layers of a random-weight model: qwen3-30b has 48 in full, mixtral 32.",
        shown="6, 4",
    )
    counts: bool = setting(
        False,
        "Count launches, waits and copies of a decode step instead of measuring. Needs --emulated.",
    )
    emulated: bool = setting(False, "Use a checkout's emulated GPU. Only with --counts.")
    keep: Path | None = setting(
        None,
        "Keeps the figures of each case in this folder, so that a call that was cut off goes on.",
        metavar="DIR",
    )

    @property
    def caps_process(self) -> bool:
        """The GPU's memory is capped, however small the model is."""
        return True


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


def getting(case: Case, how: str) -> Case:
    """The same, getting its misses in this way."""
    return replace(case, settings=case.settings | {"misses": how})


class Gpu(Benchmark):
    """A GPU's memory in shares of the experts: the cap is one on it. gpu: what `ask_device` found;
    room: what the model takes; copies: how fast the GPU was copied to before each run."""

    options = GpuOptions
    columns = (
        NAME,
        step(2),
        TTFT,
        HIT,
        moved("copied_bytes_per_token"),
        MIX,
        Column("of bound", "of_bound", percent(0, " %")),
        Column("x TPOT", "speedup", fixed(2)),
        Column("x TTFT", "ttft_speedup", fixed(2)),
        Column("x row 1", "speedup_tpot", fixed(2)),
    )
    room: Room
    cap_words = "room for {:.0%} of the experts on the GPU"

    def run(self, on: Any, note: Note = lambda text: None) -> Report:
        """Measure as every benchmark does, or count with --counts. Raises MoeEdgeError."""
        if on.counts != on.emulated:
            raise ConfigError("--counts and --emulated go together: give both or neither")
        return count(on.retention, note) if on.counts else super().run(on, note)

    def open(self, on: GpuOptions, note: Note) -> None:
        """Raises ConfigError without a GPU, before a model is made."""
        self.gpu, self.copies = ask_device(on.device), list[Result]()
        super().open(on, note)

    def cases(self) -> list[Case]:
        """Everything on the GPU; then, at each share: upstream with as many layers' experts on the
        CPU as do not fit, and with all of them; our null baseline, which gets misses in each way
        and in the one that it chooses; the rows of DyMoE's Table 3, which copies them; every other
        policy."""
        self.measure_room(self.gpu["index"])
        number, retention = self.gpu["index"] or 0, self.on.retention
        listed = [
            Case(UPSTREAM_ON_GPU, "upstream", None, "upstream", {"gpu": number}),
            replace(REFERENCE, name=MANAGED_ON_GPU),
        ]
        for cap in self.on.caps:
            fits = self.room.cpu_moe(cap)
            some, none = ({"gpu": number, "cpu_moe": n} for n in (fits, len(self.room.layers)))
            lru, _, *others = policies(cap, retention)
            listed += [
                Case(f"{UPSTREAM} {fits}", "upstream", cap, "upstream", some),
                Case(UPSTREAM_CPU, "upstream", cap, "upstream", none),
                *(replace(getting(lru, how), name=f"lru, {how}") for how in LRU_WAYS),
                *(getting(case, "copy") for case in paper_rows(cap, retention)),
                lru,
                *others,
            ]
        return listed

    def limit_bytes(self, case: Case) -> int | None:
        return None

    def shape(self) -> ModelShape:
        return model_shape(self.model, (0,), self.model.shapes)

    def cap_settings(self, case: Case) -> dict[str, Any]:
        settings: dict[str, Any] = {"device": self.on.device}
        return settings if case.cap is None else settings | {"vram": self.room.vram_bytes(case.cap)}

    def job(self, case: Case, number: int) -> Job:
        job = super().job(case, number)
        job.device = self.on.device
        # Else low copies that a policy has not used yet would come from disk.
        job.warm_host = case.system == "engine" and case.cap is not None
        if case.role == "probe":
            tokens = min(self.on.prompt_tokens, self.on.n_ctx - PROBE_TOKENS)
            job.parts = [prompt(tokens), settle(PROBE_TOKENS, self.on.max_seconds)]
            job.warm = False
        return job

    def measure(self, case: Case, number: int) -> Result:
        """As every benchmark, but a case whose figures were kept is not measured again: their file
        has a name for it and for all that it depends on."""
        if self.on.keep is None:
            return super().measure(case, number)
        told = json.dumps(asdict(self.job(case, number)))
        digest = hashlib.sha256(f"{case.key} {told}".encode())
        place = self.on.keep / f"case-{digest.hexdigest()[:20]}.json"
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            write_whole(place, json.dumps(super().measure(case, number)))
        found: Result = json.loads(place.read_text())
        return found

    def measure_room(self, gpu: int | None) -> None:
        """Computes a prompt and some tokens with each engine and few experts on the GPU, to see
        what it takes beside them. A kernel takes memory when it is first launched, so ours gets
        the row with most of them: two precisions and look-ahead, with the largest share; and
        upstream one layer's experts. gpu: its number, None for main memory in the place of one,
        where what is taken is estimated. Raises MoeEdgeError."""
        options, model = self.on, self.model
        rows = {case.name: case for case in paper_rows(1.0, options.retention)}
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
        ours, theirs = memory[0]["fixed"], memory[1]["llama"]
        if gpu is not None:  # our plan refuses what is less than its estimate
            experts = memory[0]["planned"] - ours
            ours = max(ours, memory[0]["used"] - experts) + SPARE_BYTES
            theirs = max(theirs, memory[1]["used"]) + SPARE_BYTES - layers[-1]
        self.room = Room(ours, theirs, layers)

    def bandwidth(self, number: int, seconds: float = 1.5) -> disk.Bandwidth:
        """Beside that of a run, how fast the GPU is copied to."""
        if len(self.copies) <= number:
            self.copies.append(ask_device(self.on.device)["copies"])
        return super().bandwidth(number, seconds)

    def row(self, case: Case, runs: Sequence[Result]) -> Result:
        """With the GPU's memory, and what was copied to it."""
        row = case_row(case, runs, None if case.cap is None else self.room.vram_bytes(case.cap))
        if "error" in row:
            return row
        if case.role == "reference" and row["hit_rate"] < 1:
            return {key: row[key] for key in ("name", "cap", "role", "limit_bytes")} | {
                "error": "not all experts fit the GPU"
            }
        row["peak_bytes"] = max(each["memory"]["used"] for each in runs)
        if "hit_rate" in row:
            copied = [per_token(run, "copied_bytes") for run in runs]
            row["copied_bytes_per_token"] = statistics.median(copied)
            for cause in WAITS:
                waited = [per_token(run, f"{cause} wait") for run in runs]
                row[f"{cause} wait"] = statistics.median(waited) / self.model.n_layers
        return row

    def notes(self, rows: Sequence[Result]) -> list[str]:
        """Also what the decoding thread waited for, in microseconds per layer and token."""
        lines = []
        for row in good(rows):
            if "hit_rate" in row:
                waits = ", ".join(f"{cause} {row[f'{cause} wait']:.0f}" for cause in WAITS)
                lines.append(f"{row['name']}: waits per layer, us: {waits}")
        return super().notes(rows) + lines

    def compare(self, rows: Sequence[Result], runs: Sequence[Sequence[Result]]) -> None:
        """Adds to each row its speed and first token against upstream's better one at the same
        share, and of the rows of the paper against load on demand; and the bound of what misses:
        computing is the managed path with everything on the GPU, 0 where that did not fit."""
        for same in caps_of(rows):
            upstream = [row for row in same if row["role"] == "upstream"]
            add_ratio(same, "speedup", upstream)
            add_ratio(same, "ttft_speedup", upstream, "ttft_ms_runs")
        add_over_demand(rows)
        reads = [each.bytes_per_s for each in self.bandwidths]
        reference = [row for row in rows if row["role"] == "reference"]
        compute = best_runs(reference) or [0.0] * len(reads)
        for row, each in zip(rows, runs, strict=True):
            if "hit_rate" in row and row["cap"] is not None:
                waits = [[wait_ms(*given)] for given in zip(each, self.copies, reads, strict=True)]
                add_bound(row, compute, waits)

    def intro(self) -> list[str]:
        options, gpu = self.on, self.gpu
        pinned, pageable, compute = (
            ", ".join(f"{each[name] / 1e9:.2f}" for each in self.copies) + " GB/s"
            if self.copies[0][name]
            else "refused"
            for name in ("pinned", "pageable", "compute")
        )
        return [
            f"{gpu['name']}, {format_size(gpu['total_bytes'])}; copies to it {pinned} pinned, "
            f"{pageable} pageable; the host computes {compute}",
            f"{options.tokens} decode steps with the same {options.words} tokens for all, "
            f"{options.prompt_tokens} before them, {options.runs} runs in turn; x TPOT, x TTFT: "
            f"against upstream's best; dymoe at r = {options.retention}",
            "bound: the slower of computing (all on the GPU) and what tokens missed / those speeds",
            "rows 1 to 6: Table 3 of DyMoE, misses copied; x row 1: in TPOT",
        ]


def ask_device(name: str) -> Result:
    """A GPU, as a process of its own finds it: this one shall take nothing of its memory. Raises
    ConfigError where there is none."""
    job = Job("device", "", None, {}, n_ctx=0, n_ubatch=0, threads=1, parts=[], seed=0, device=name)
    found = Benchmark._spawn(job)
    if "error" in found:
        raise ConfigError(found["error"])
    return found


def wait_ms(run: Result, speeds: Result, disk_speed: float) -> float:
    """Return the milliseconds that the misses of one token need at least.

    Copies to the GPU, computing on the host and reads from disk run at the same time, each at its
    peak speed. speeds: the fields of native.Bandwidths."""
    link = speeds["pinned"] or speeds["pageable"]
    by_host = per_token(run, "host_computed_bytes")
    over_link = per_token(run, "needed_copied_bytes") / link
    computed = by_host / speeds["compute"] if by_host else 0.0
    return float(1e3 * max(over_link, computed, per_token(run, "needed_bytes") / disk_speed))
