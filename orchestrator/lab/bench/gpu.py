"""`moe-edge bench gpu`: upstream and all policies on a GPU, at equal shares of its memory."""

from __future__ import annotations

import hashlib
import json
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gguf_tools.units import format_size
from orchestrator.allocation.slots import ModelShape
from orchestrator.cache.files import write_whole
from orchestrator.config import MISSES
from orchestrator.cost import disk
from orchestrator.errors import ConfigError, MoeEdgeError
from orchestrator.lab.bench import table3
from orchestrator.lab.bench.benchmark import Benchmark
from orchestrator.lab.bench.cases import (
    MIXED_AHEAD,
    ON_DEMAND,
    REFERENCE,
    Case,
    paper_rows,
    policies,
)
from orchestrator.lab.bench.child import COLD, Job, Part, decode, prompt, settle
from orchestrator.lab.bench.counts import count
from orchestrator.lab.bench.models import HIGH, LOW, Note, model_bytes
from orchestrator.lab.bench.options import Asked, BenchOptions
from orchestrator.lab.bench.predict import predict
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
    median_ms,
    moved,
    per_token,
    step,
)
from orchestrator.lab.table import Column, Report, fixed, percent
from orchestrator.native.abi import WAITS
from orchestrator.plan.footprint import model_shape
from orchestrator.runtime.load import SPARE_BYTES
from orchestrator.settings import Notation, inherit, parse_size, setting


def parse_bandwidth(text: str) -> int:
    """Convert a text such as "12GB/s" to bytes per second. Raises ConfigError."""
    return parse_size(text.removesuffix("/s"))


BANDWIDTH = Notation(parse_bandwidth, lambda speed: f"{speed / 1e9:g}GB/s")
UPSTREAM, UPSTREAM_CPU = "upstream, n-cpu-moe", "upstream, all on CPU"
UPSTREAM_ON_GPU, MANAGED_ON_GPU = "upstream, all on GPU", "lru, all on GPU"
LRU_WAYS = tuple(how for how in MISSES if how != "auto")
PROBE_TOKENS = 4  # decoded after the prompt, to include the kernels for single tokens


@dataclass(frozen=True)
class GpuOptions(BenchOptions):
    """Options of `moe-edge bench gpu`.

    - caps: fractions of the experts (in the best precision) that fit in the GPU's memory, next to
      the rest of the model.
    - device: name of the GPU.

    Raises ConfigError for an invalid value.
    """

    caps: tuple[float, ...] = inherit(
        BenchOptions,
        "caps",
        (0.25, 0.5),
        help="Limits of the GPU memory for experts, in percent of the size of all experts.",
    )
    routing: str = inherit(BenchOptions, "routing", "zipf")
    prompt_tokens: int = inherit(BenchOptions, "prompt_tokens", 1024)
    device: str = setting("cuda0", "Name of the GPU.", metavar="NAME")
    layers: int | None = inherit(
        BenchOptions,
        "layers",
        help="Layers of a random-weight model. The full qwen3-30b has 48, mixtral 32.",
        shown="6, 4",
    )
    counts: bool = setting(
        False,
        "Count GPU operations (launches, waits, copies) per decode step. Needs --emulated.",
    )
    emulated: bool = setting(
        False, "Emulate a GPU on the CPU. Only with --counts. Needs a source checkout."
    )
    link: int | None = setting(
        None,
        "Imitate a slow link to the GPU, such as 12GB/s, by copying each expert several times. "
        "Upstream llama.cpp is not measured.",
        notation=BANDWIDTH,
        metavar="SPEED",
        shown="its own",
    )
    table3: bool = setting(
        False,
        "Measure the rows of Table 3 of the DyMoE paper and the policies dynaexq and floor, with "
        "all layers of qwen3-30b. Writes 27 GB of model files to /dev/shm (a RAM disk), or to disk "
        "if memory is too small.",
    )
    predict: bool = setting(
        False,
        "With --table3: predict the speeds by simulation, without a GPU. Needs --link.",
    )
    models: Path | None = setting(None, "Folder of the generated models.", option=False)
    keep: Path | None = setting(
        None,
        "Save the results of each table row in this folder. A later call reuses them.",
        metavar="DIR",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.predict and not (self.table3 and self.link):
            raise ConfigError(
                "--predict needs --table3 and --link: give both, or leave --predict out"
            )

    @classmethod
    def of(cls: type[Asked], given: Mapping[str, Any]) -> Asked:
        """Return the options of `moe-edge bench gpu` for the values given on the command line.

        An option that was not given has its default. The option --table3 measures the rows of Table
        3 of the DyMoE paper. With it, some other options have other defaults, such as the number of
        layers.

        - given: maps names of options to their values.

        Raises ConfigError if values are invalid or contradict each other.
        """
        if given.get("table3"):
            quick = ("shape", "layers") if given.get("quick") else ()
            usual = {name: v for name, v in table3.DEFAULTS.items() if name not in quick}
            given = usual | {name: v for name, v in given.items() if v is not None}
        return super().of(given)

    def parts(self) -> list[Part]:
        # The first prompt starts with empty slots (cold). The second prompt starts with the experts
        # that decoding left in memory, like the second question of a chat.
        first = [prompt(self.prompt_tokens, COLD), settle(self.warmup, self.max_seconds / 3)]
        found = [*first, prompt(self.prompt_tokens), decode(self.tokens, self.max_seconds)]
        return [*found, prompt(self.n_ubatch, table3.LONG)] if self.table3 else found

    @property
    def n_ubatch(self) -> int:
        """Maximum number of tokens of a step, so that the longest prompt is one step."""
        return self.prompt_tokens * (table3.LONGER if self.table3 else 1)

    @property
    def same_layers(self) -> bool:
        """Whether all layers of the model have the same experts, which are generated only once."""
        return self.table3

    @property
    def folder(self) -> Path:
        """The folder for the model files that the benchmark writes (random weights or the demo)."""
        return self.models or super().folder

    @property
    def caps_process(self) -> bool:
        """Whether a memory cap limits more than the cache of experts. Here, this is always True.

        In this benchmark, a cap limits all GPU memory of the process that runs the model.
        """
        return True


def nearest_times(own: float, wanted: float) -> int:
    """Return how many times to copy each expert, to imitate a link of another bandwidth.

    Copying n times divides the bandwidth by n. The result is the n for which `own` / n is nearest
    to `wanted`. Both bandwidths are in bytes per second.
    """
    fewer = max(1, int(own / wanted))
    return min((fewer, fewer + 1), key=lambda times: abs(own / times - wanted))


def add_over_demand(rows: Sequence[Result]) -> None:
    """Add to each row of the benchmark its speed-ups over loading experts on demand.

    The keys are "speedup_tpot" (time per token) and "speedup_ttft" (time to the first token). Each
    row is compared with the row "load on demand" that was measured under the same cap on GPU
    memory.
    """
    for same in caps_of(rows):
        demand = [row for row in same if row["name"] == ON_DEMAND]
        add_ratio(same, "speedup_tpot", demand)
        add_ratio(same, "speedup_ttft", demand, "ttft_ms_runs")


@dataclass(frozen=True, slots=True)
class FixedMemory:
    """The GPU memory that a model needs without its experts, and the size of its experts.

    - ours: memory that our engine needs without experts, in bytes.
    - theirs: memory that upstream llama.cpp needs if all experts are on the CPU, in bytes.
    - layers: size of the experts of each layer, in bytes.
    """

    ours: int
    theirs: int
    layers: tuple[int, ...]

    def vram_bytes(self, share: float) -> int:
        """Return the bytes of GPU memory for a model with a part of its experts on the GPU.

        - share: this part, as a fraction of the bytes of all experts.

        The result is large enough for both our engine and upstream llama.cpp, which need different
        amounts of memory for the rest of the model.
        """
        return max(self.ours, self.theirs) + int(share * sum(self.layers))

    def cpu_moe(self, share: float) -> int:
        """Return the smallest --n-cpu-moe of llama.cpp with which a model fits on the GPU.

        This option of llama.cpp is the number of layers whose experts stay on the CPU. The size of
        the GPU memory is `vram_bytes(share)`.

        - share: the fraction of the bytes of all experts for which this memory has space, in
          addition to the rest of the model.
        """
        left = self.vram_bytes(share) - self.theirs
        n = len(self.layers)
        while n > 0 and self.layers[n - 1] <= left:
            n -= 1
            left -= self.layers[n]
        return n


def with_misses(case: Case, how: str) -> Case:
    """Return a copy of a benchmark case that handles missing experts in another way.

    A case is one system with its settings. Missing experts are those that are not on the GPU.

    - how: "copy" copies them to the GPU, "compute" computes them on the CPU, and "auto" chooses the
      faster way for each expert.
    """
    return replace(case, settings=case.settings | {"misses": how})


class Gpu(Benchmark):
    """Compares llama.cpp and our policies on a GPU whose memory has a cap.

    - gpu: description of the GPU, from `ask_device`.
    - fixed_memory: GPU memory of the model without experts.
    - times: how often each expert is copied, to imitate a slower link.
    - copies: bandwidth of copies to the GPU, measured before each run.
    """

    options = GpuOptions
    columns: Sequence[Column] = (
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
    on: GpuOptions = GpuOptions()
    times = 1
    fixed_memory: FixedMemory
    cap_words = "GPU memory for {:.0%} of the experts"

    def run(self, on: Any, note: Note = lambda text: None) -> Report:
        """Run the benchmark that the options `on` select, and return its report.

        By default, the benchmark measures the speed of llama.cpp and of our policies under each
        memory cap. With the option counts, it counts GPU operations per decode step. With the
        option predict, it simulates instead of measuring.

        - on: the GpuOptions.
        - note: receives progress messages.

        Raises MoeEdgeError if the GPU or the model cannot be used.
        """
        if on.counts != on.emulated:
            raise ConfigError("--counts and --emulated need each other: give both or neither")
        if on.counts:
            return count(on.retention, note)
        if on.predict:
            return predict(on, note)
        if not on.table3:
            return super().run(on, note)
        folder = table3.memory_folder(model_bytes(on, (HIGH, LOW)))
        try:
            return super().run(replace(on, models=folder), note)
        finally:
            if folder is not None:  # the models would occupy memory
                shutil.rmtree(folder, ignore_errors=True)

    def open(self, on: GpuOptions, note: Note) -> None:
        """Find the GPU, then open the model file that is measured. A missing file is generated.

        - on: the options of the benchmark, which describe the device and the model.
        - note: receives progress messages.

        Raises ConfigError if no GPU is found. In this case, no file is generated.
        """
        self.gpu, self.copies, self.times = ask_device(on.device), list[Result](), 1
        self.on = on
        if on.table3:
            self.columns = table3.columns(on.prompt_tokens)
        if on.link is not None:
            self.times = nearest_times(link_speed(self.gpu["copies"]), on.link)
            speed = link_speed(self.ask_link())
            note(
                f"each expert is copied {self.times} times, to imitate a slow link: "
                f"{speed / 1e9:.1f} GB/s instead of "
                f"{link_speed(self.gpu['copies']) / 1e9:.1f} GB/s"
            )
        super().open(on, note)

    def cases(self) -> list[Case]:
        """Return the cases to measure: first with everything on the GPU, then under each cap.

        Under each cap, these are:

        - llama.cpp with the experts of as few layers as possible on the CPU, and with all experts
          on the CPU;
        - our LRU policy with each way to handle misses, and with the automatic choice;
        - the rows of DyMoE's Table 3, which copy missing experts to the GPU;
        - all other policies.
        """
        self.measure_fixed_memory(self.gpu["index"])
        listed = self._table3_cases() if self.on.table3 else self._all_cases()
        # Copies of upstream are not slower, so its rows would not be comparable.
        return [case for case in listed if self.times == 1 or case.system != "upstream"]

    def _table3_cases(self) -> list[Case]:
        caps, retention = self.on.caps, self.on.retention
        number, fits = self.gpu["index"] or 0, self.fixed_memory.cpu_moe(caps[0])
        table = table3.write_losses(self.high.with_suffix(".losses.json"), self.high)
        listed: list[Case] = []
        if self.times == 1:  # everything on the GPU does not depend on the link
            listed.append(Case(UPSTREAM_ON_GPU, "upstream", None, "upstream", {"gpu": number}))
            listed += table3.on_gpu()
        for cap in caps:
            ours = table3.cases_under(cap, cap == caps[0], retention, table)
            some = {"gpu": number, "cpu_moe": fits}
            if cap == caps[0]:
                listed.append(Case(f"{UPSTREAM} {fits}", "upstream", cap, "upstream", some))
            listed += [with_misses(case, "copy") for case in ours]
        return listed

    def _all_cases(self) -> list[Case]:
        number, retention = self.gpu["index"] or 0, self.on.retention
        listed = [
            Case(UPSTREAM_ON_GPU, "upstream", None, "upstream", {"gpu": number}),
            replace(REFERENCE, name=MANAGED_ON_GPU),
        ]
        for cap in self.on.caps:
            fits = self.fixed_memory.cpu_moe(cap)
            some, none = (
                {"gpu": number, "cpu_moe": n} for n in (fits, len(self.fixed_memory.layers))
            )
            lru, _, *others = policies(cap, retention)
            listed += [
                Case(f"{UPSTREAM} {fits}", "upstream", cap, "upstream", some),
                Case(UPSTREAM_CPU, "upstream", cap, "upstream", none),
                *(replace(with_misses(lru, how), name=f"lru, {how}") for how in LRU_WAYS),
                *(with_misses(case, "copy") for case in paper_rows(cap, retention)),
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
        return (
            settings
            if case.cap is None
            else settings | {"vram": self.fixed_memory.vram_bytes(case.cap)}
        )

    def job(self, case: Case, number: int) -> Job:
        job = super().job(case, number)
        job.device = self.on.device
        # Put all experts into host memory first. Otherwise, low copies that a policy has not used
        # yet would be read from disk.
        job.warm_host = case.system == "engine" and case.cap is not None
        job.copy_times = self.times if case.system == "engine" else 1
        if self.on.table3:
            job.start_seconds = table3.START_SECONDS
            if case.system == "engine":
                job.settings["direct_io"] = False  # the file is in memory, or in the page cache
        if case.role == "probe":
            tokens = min(self.on.n_ubatch, self.on.n_ctx - PROBE_TOKENS)
            job.parts = [prompt(tokens), settle(PROBE_TOKENS, self.on.max_seconds)]
            job.warm = False
        return job

    def measure(self, case: Case, number: int) -> Result:
        """Measure a benchmark case once, or return the result that an earlier call saved.

        A case is one system under one memory cap. Results are saved in the folder `keep` of the
        options, if given. The name of the file is a hash of the case and of everything that it
        depends on.

        - number: index of the run. A run measures every case once.
        """
        if self.on.keep is None:
            return super().measure(case, number)
        text = json.dumps(asdict(self.job(case, number)))
        digest = hashlib.sha256(f"{case.key} {text}".encode())
        place = self.on.keep / f"case-{digest.hexdigest()[:20]}.json"
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            write_whole(place, json.dumps(super().measure(case, number)))
        found: Result = json.loads(place.read_text())
        return found

    def measure_fixed_memory(self, gpu: int | None) -> None:
        """Measure how much GPU memory a model needs apart from its experts.

        The need is measured for our engine and for upstream llama.cpp, and stored in the attribute
        `fixed_memory`.

        - gpu: number of the GPU whose memory use is measured. None means that the device has no
          memory of its own, like an emulated GPU. In this case, the sizes that both engines report
          are stored.

        Raises MoeEdgeError if one of the two engines fails.
        """
        options, model = self.on, self.model
        rows = {case.name: case for case in paper_rows(1.0, options.retention)}
        slots = int(max(options.caps) * model.tier_bytes[0])
        # Kernels allocate memory when they are first launched. Two precisions and prefetching need
        # the most kernels.
        settings = rows[MIXED_AHEAD].settings | {"expert_ram": slots}
        managed = Case("room", "engine", None, "probe", settings)
        on_cpu = {"gpu": gpu or 0, "cpu_moe": model.n_layers - 1}
        upstream = Case("room", "upstream", None, "probe", on_cpu)
        self.note("measuring how much GPU memory the model needs without experts")
        memory = []
        for case in (managed, upstream):
            found = self.measure(case, 0)
            if "error" in found:
                raise MoeEdgeError(
                    f"the GPU memory that {self.high} needs cannot be measured: "
                    f"{found['error']}. If the GPU has too little memory, give smaller --caps"
                )
            memory.append(found["memory"])
        layers = tuple(
            sum(tiers[0].expert_bytes * model.n_expert for tiers in kinds if tiers[0])
            for kinds in model.slices
        )
        ours, theirs = memory[0]["fixed"], memory[1]["llama"]
        if gpu is not None:  # use at least our plan's estimate, because it refuses a lower cap
            experts = memory[0]["planned"] - ours
            ours = max(ours, memory[0]["used"] - experts) + SPARE_BYTES
            theirs = max(theirs, memory[1]["used"]) + SPARE_BYTES - layers[-1]
        self.fixed_memory = FixedMemory(ours, theirs, layers)

    def bandwidth(self, number: int, seconds: float = 1.5) -> disk.Bandwidth:
        """Measure disk reads and copies to the GPU, and return the speed of the disk reads.

        A run measures all cases of the benchmark once. This method may be called several times in a
        run:

        - Disk reads are measured in each call. With the option --table3, only the first call in a
          run measures disk reads. Later calls return the last result.
        - Copies to the GPU are measured only in the first call in a run. The result is added to the
          attribute `copies`.

        number: the index of the run. seconds: the approximate duration of the disk measurement.
        """
        if len(self.copies) <= number:
            self.copies.append(self.ask_link())
        elif self.on.table3:
            return self.bandwidths[-1]
        return super().bandwidth(number, seconds)

    def forget(self) -> None:
        """Evict the model's files from the operating system's page cache.

        With the option --table3 nothing is evicted, because the model stays in main memory.
        """
        if not self.on.table3:
            super().forget()

    def ask_link(self) -> Result:
        """Measure the bandwidth of copies to the GPU, and the computing speed of the host.

        The result has the fields of native.Bandwidths. If --link imitates a slower link, the
        bandwidth of the slower link is measured.
        """
        found: Result = ask_device(self.on.device, self.times)["copies"]
        return found

    def measured(self, case: Case, runs: Sequence[Result]) -> None:
        """Called after each run of a case (a system under a memory cap). Reports its speed at once.

        The report is a progress message. It has the time per token, and the times to read a short
        and a long prompt. It is sent only with the option --table3.

        - runs: the results of the case so far.
        """
        if self.on.table3:
            self.note(table3.line(case, self.row(case, runs), self.on.prompt_tokens))

    def row(self, case: Case, runs: Sequence[Result]) -> Result:
        """Return the metrics of one case as a table row (dict), from the results of all its runs.

        A case is one system under one memory cap. The metrics include speeds, the GPU memory in
        use, and the bytes copied to the GPU. If the case failed, the row has an "error" instead.
        """
        row = case_row(
            case, runs, None if case.cap is None else self.fixed_memory.vram_bytes(case.cap)
        )
        if "error" in row:
            return row
        if case.role == "reference" and row["hit_rate"] < 1:
            return {key: row[key] for key in ("name", "cap", "role", "limit_bytes")} | {
                "error": "the experts do not fit in the GPU's memory"
            }
        row["peak_bytes"] = max(each["memory"]["used"] for each in runs)
        if self.on.table3:
            row["long_ms"] = statistics.median(median_ms(runs, table3.LONG))
        if "hit_rate" in row:
            copied = [per_token(run, "copied_bytes") for run in runs]
            row["copied_bytes_per_token"] = statistics.median(copied)
            for cause in WAITS:
                waited = [per_token(run, f"{cause} wait") for run in runs]
                row[f"{cause} wait"] = statistics.median(waited) / self.model.n_layers
        return row

    def notes(self, rows: Sequence[Result]) -> list[str]:
        """Return the footnotes of a table.

        They include how long the decoding thread waited per layer and token, by cause.
        """
        lines = []
        for row in good(rows):
            if "hit_rate" in row:
                lines.append(
                    f"{row['name']}: time that decoding waited, in us per layer and token, by "
                    f"cause: {table3.waits_text(row)}"
                )
        return super().notes(rows) + lines

    def compare(self, rows: Sequence[Result], runs: Sequence[Sequence[Result]]) -> None:
        """Add speed-ups and a lower bound of the time per token to the rows of the report.

        A row has the metrics of one system under one cap on GPU memory. Speed-ups are relative to
        the fastest row of llama.cpp under the same cap, and to the row that loads experts on
        demand. The lower bound is the time to compute a token or to load its missing experts,
        whichever is longer.

        - runs: the measurements of each row.
        """
        for same in caps_of(rows):
            upstream = [row for row in same if row["role"] == "upstream"]
            add_ratio(same, "speedup", upstream)
            add_ratio(same, "ttft_speedup", upstream, "ttft_ms_runs")
        if self.on.table3:
            table3.add_over_row_1(rows)
        else:
            add_over_demand(rows)
        reads = [each.bytes_per_s for each in self.bandwidths]
        reference = [row for row in rows if row["role"] == "reference"]
        if self.on.table3 and not reference:
            return  # the time of computing alone is not known
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
        lines = [
            f"GPU: {gpu['name']}, {format_size(gpu['total_bytes'])} of memory",
            f"speed of copies from pinned memory to the GPU: {pinned}",
            f"speed of copies from pageable memory to the GPU: {pageable}",
            f"speed of computing experts on the CPU, in bytes of expert weights per second: "
            f"{compute}",
            "Each row of a table is one system: upstream llama.cpp, or moe-edge with one policy.",
            f"All systems decode {options.tokens} steps after the same prompt of "
            f"{options.prompt_tokens} tokens (kind of tokens: {options.words}).",
            f"Number of measurements of each system: {options.runs}. The systems take turns.",
            f"On average, the policy dymoe keeps {options.retention:.1%} of the experts in the "
            f"high precision (--retention).",
            "Rows 1 to 6 are those of Table 3 of the DyMoE paper. Rows 1 to 6 copy missing experts "
            "to the GPU.",
            'Rows with "4/2" in their name: experts have 4 or 2 bits per weight.',
            'Rows with "4/0" in their name: experts have 4 bits per weight or are skipped.',
        ]
        if self.times > 1:
            lines.insert(
                0,
                f"To imitate a slow link to the GPU (--link), each expert is copied {self.times} "
                f"times. Copies reach {link_speed(self.copies[0]) / 1e9:.1f} GB/s instead of "
                f"{link_speed(gpu['copies']) / 1e9:.1f} GB/s. Upstream llama.cpp is not measured.",
            )
        if options.table3:
            return [*lines, *table3.intro(options.prompt_tokens, options.n_ubatch)]
        return [
            *lines,
            "TPOT is the time per output token, and TTFT is the time to the first token.",
            'The columns "x TPOT" and "x TTFT" are speed-ups over the fastest row of upstream '
            "llama.cpp in the same table.",
            f'The column "x row 1" is the speed-up in TPOT over "{ON_DEMAND}".',
            'The column "of bound" is the measured speed as a share of the highest possible speed. '
            "At the highest possible speed, a token takes as long as its compute time or its load "
            "time, whichever is longer.",
            "Compute time of a token: the time with all experts on the GPU.",
            "Load time of a token: the time to load the token's missing experts.",
        ]


def link_speed(copies: Result) -> float:
    """Return the measured bandwidth of copies to the GPU, in bytes per second.

    This is the bandwidth of copies from pinned memory, or from pageable memory if the driver
    cannot pin memory.
    """
    return float(copies["pinned"] or copies["pageable"])


def ask_device(name: str, copy_times: int = 1) -> Result:
    """Return the name, the memory and the copy bandwidth of a GPU, as a dict.

    A child process measures them, so that this process uses no GPU memory. The GPU copies the data
    `copy_times` times, to imitate a slower link. Raises ConfigError if the GPU does not exist.
    """
    job = Job("device", "", None, {}, n_ctx=0, n_ubatch=0, threads=1, parts=[], seed=0, device=name)
    job.copy_times = copy_times
    found = Benchmark._spawn(job)
    if "error" in found:
        raise ConfigError(found["error"])
    return found


def wait_ms(run: Result, speeds: Result, disk_speed: float) -> float:
    """Return a lower bound of the time that a token waits for experts, in milliseconds.

    An expert that is not on the GPU is read from disk, copied to the GPU, or computed by the CPU.
    The bound is the longest of these times at peak speed, because they can overlap.

    - run: results of one process, with the bytes that were read, copied and computed.
    - speeds: peak speeds of copies and of the CPU, as in native.Bandwidths.
    - disk_speed: peak speed in bytes per second.
    """
    link = link_speed(speeds)
    by_host = per_token(run, "host_computed_bytes")
    over_link = per_token(run, "needed_copied_bytes") / link
    computed = by_host / speeds["compute"] if by_host else 0.0
    return float(1e3 * max(over_link, computed, per_token(run, "needed_bytes") / disk_speed))
