"""The base class of all benchmarks.

Each case runs in its own processes, and the cases take turns.
"""

from __future__ import annotations

import os
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from gguf_tools.experts import ExpertModel
from gguf_tools.process import processor_name
from gguf_tools.synthetic.tensors import RESIDUAL_POWER
from gguf_tools.units import format_size
from orchestrator.allocation.slots import ModelShape
from orchestrator.cost import disk
from orchestrator.errors import ConfigError
from orchestrator.lab.bench.cases import Case, chosen
from orchestrator.lab.bench.child import Job, longest_context
from orchestrator.lab.bench.models import DEMO_TEXT, HIGH, LOW, Note, build_models
from orchestrator.lab.bench.options import BenchOptions
from orchestrator.lab.bench.rows import MIB, Result, caps_of, case_row, row_notes
from orchestrator.lab.children import forget_files, memory_group, run_child
from orchestrator.lab.table import Column, Report, Table
from orchestrator.plan.footprint import model_shape

START_SECONDS = 300.0
# The first line of a report with --quick.
QUICK_NOTE = (
    "--quick: a tiny model and few tokens, to test that the benchmark runs. Ignore its figures."
)


class Benchmark(ABC):
    """Measures several systems on one model, under several memory caps.

    A case is one system under one cap, and each case becomes a row of a table. The model is
    generated if it is missing.

    - on: the options.
    - bandwidths: disk bandwidth measured before each run of all cases.
    - skipped: reasons for parts that could not be measured.
    """

    options: ClassVar[type[BenchOptions]]
    columns: Sequence[Column]

    def open(self, on: Any, note: Note) -> None:
        """Open the model file that this benchmark measures. The file is generated if it is missing.

        - on: the options of the benchmark, which describe the model.
        - note: receives progress messages.

        Raises MoeEdgeError if the model cannot be generated. Raises ConfigError if the benchmark
        needs a longer context than the model was trained for.
        """
        self.on, self.note = on, note
        self.high, self.low = build_models(on, (HIGH, LOW), note)
        self.model = ExpertModel.open(self.high, self.low)
        self.file_bytes = self.high.stat().st_size
        self.bandwidths: list[disk.Bandwidth] = []
        self.skipped: list[str] = []
        longest = longest_context(on.parts(), shared=False)
        most = self.model.hparams.context_length
        if most and longest > most:
            raise ConfigError(
                f"the benchmark needs a context of {longest} tokens, the model was trained for "
                f"{most}: use a shorter prompt or fewer tokens"
            )

    @abstractmethod
    def cases(self) -> list[Case]:
        """Return the cases to measure (systems under memory caps), in the order of the tables."""

    def row(self, case: Case, runs: Sequence[Result]) -> Result:
        """Return the table row of a case (a system under a memory cap): a dict with its metrics.

        The metrics are computed over all `runs` (repetitions) of the case. If the case failed, the
        row has the key "error" with the reason instead.
        """
        return case_row(case, runs, self.limit_bytes(case))

    @abstractmethod
    def compare(self, rows: Sequence[Result], runs: Sequence[Sequence[Result]]) -> None:
        """Compare the table rows with each other, and add the results to them as metrics.

        An example of such a metric is a row's speed-up over the row of upstream llama.cpp. `runs`
        has the measurements of each row.
        """

    @abstractmethod
    def intro(self) -> list[str]:
        """Return paragraphs for the report that explain the measurement and its columns."""

    def notes(self, rows: Sequence[Result]) -> list[str]:
        """Return the footnotes of the table that consists of these rows."""
        return row_notes(rows)

    def run(self, on: BenchOptions, note: Note = lambda text: None) -> Report:
        """Measure all cases and return the report, with one table per memory cap.

        The first table has no cap: everything is in memory. `note` receives progress messages. A
        case that fails is reported in its row. Raises MoeEdgeError if the model cannot be generated
        or read.
        """
        quick = [QUICK_NOTE] if on.quick else []
        for line in quick:
            note(line)
        self.open(on, note)
        listed, tables = chosen(self.cases(), on.rows), []
        runs = self.measure_all(listed)
        rows = [self.row(case, each) for case, each in zip(listed, runs, strict=True)]
        self.compare(rows, runs)
        # Put the description of the model into the title, because tables are often quoted without
        # the heading.
        runs_text = "1 run" if on.runs == 1 else f"{on.runs} runs"
        made = f"{self.model.n_layers} layers, {runs_text}"
        if not on.trained:
            made = (
                f"{made}, random weights (each layer adds {RESIDUAL_POWER:.1f} times the variance "
                f"of the embeddings to the residual stream)"
            )
        for same in caps_of(rows):
            cap, limit = same[0]["cap"], same[0]["limit_bytes"]
            title = "everything in memory" if cap is None else self.cap_words.format(cap)
            title += "" if limit is None else f", {limit / MIB:.0f} MiB"
            tables.append(Table(f"{title}; {made}", self.columns, same, self.notes(same)))
        return Report([*quick, *self._heading(), *self.intro()], tables, self.skipped)

    def _heading(self) -> list[str]:
        """Return lines that describe the model, the machine, the disk and the routing."""
        on, model, disks = self.on, self.model, self.bandwidths
        threads, speeds = on.n_threads, [each.bytes_per_s / 1e9 for each in disks]
        weights = "trained" if on.trained else "random weights"
        routing = "trained" if on.trained else on.routing
        cores = len(os.sched_getaffinity(0))
        threads_text = "1 compute thread" if threads == 1 else f"{threads} compute threads"
        io_kind = "direct" if all(each.direct for each in disks) else "buffered"
        all_speeds = ", ".join(f"{each:.2f}" for each in speeds)
        return [
            f"model {on.model_name}: {model.n_layers} layers of {model.n_expert} experts, "
            f"{model.n_expert_used} experts per token, {format_size(self.file_bytes)} in "
            f"{model.tiers[0].name}, {weights}",
            f"{processor_name()}, {cores} cores, {threads_text}",
            f"disk speed: {statistics.median(speeds):.2f} GB/s, median of all runs ({all_speeds}), "
            f"with {io_kind} reads of {disks[0].slice_bytes / 1e6:.2f} MB by {on.io_threads} "
            f"threads",
            f"routing: {routing}",
        ]

    def measure_all(self, listed: Sequence[Case]) -> list[list[Result]]:
        """Measure each case (a system under a memory cap) several times, and return the results.

        The option `runs` is the number of times. The result has one list for each of the `listed`
        cases, with a dict of measurements for each time.

        All cases are measured once before any case is measured again, so that compared measurements
        are only minutes apart. A case that failed is not repeated.
        """
        for case in listed:
            self.file_of(case.tier)  # generate the files now, so that a full disk fails early
        results: list[list[Result]] = [[] for _ in listed]
        for number in range(self.on.runs):
            self.bandwidths.append(self.bandwidth(number))
            before = self.bandwidths[-1].bytes_per_s
            for case, earlier in zip(listed, results, strict=True):
                if any("error" in each for each in earlier):
                    continue
                self.note(f"run {number + 1} of {self.on.runs}: {case.key}")
                earlier.append(self.measure(case, number))
                self.measured(case, earlier)
                if case.cap is not None and case.system == "engine":
                    after = self.bandwidth(number, 0.5).bytes_per_s
                    earlier[-1]["disk"], before = [before, after], after
        return results

    def measured(self, case: Case, runs: Sequence[Result]) -> None:
        """Called after each run of a case (a system under a memory cap). Reports a failure at once.

        `runs` has the results of the case so far.
        """
        if "error" in runs[-1]:
            self.note(f"{case.key}: {runs[-1]['error']}")

    def skip(self, reason: str) -> None:
        """Report once why a part of the benchmark could not be measured.

        An empty reason is ignored.
        """
        if reason and reason not in self.skipped:
            self.skipped.append(reason)
            self.note(reason)

    def forget(self) -> None:
        """Evict the model's files from the page cache, except in a quick run."""
        if not self.on.quick:
            self.skip(forget_files([self.high, self.low]))

    def bandwidth(self, number: int, seconds: float = 1.5) -> disk.Bandwidth:
        """Measure the disk bandwidth by reading parts of the model for about `seconds`.

        `number` is the number of the run. It is the seed for the choice of the parts.
        """
        self.forget()
        return disk.read_bandwidth(
            self.model,
            threads=self.on.io_threads,
            seconds=0.1 if self.on.quick else seconds,
            seed=number,
        )

    @property
    def fewer_experts(self) -> tuple[str, int]:
        """A setting that makes llama.cpp use fewer experts per token: (metadata key, number).

        The number is the model's own number of experts per token times the option `retention`.
        """
        used = self.model.n_expert_used
        architecture = self.model.metadata["general.architecture"]
        fewer = min(used - 1, round(used * self.on.retention))
        return f"{architecture}.expert_used_count", max(1, fewer)

    def file_of(self, tier: str | None) -> Path:
        """Return the model file whose experts have the type `tier`; None is the high precision.

        The file is generated if it is missing.
        """
        return self.high if tier is None else build_models(self.on, (tier,), self.note)[0]

    def limit_bytes(self, case: Case) -> int | None:
        """Return the memory limit in bytes for the process that runs a case.

        A case is a system under a memory cap. The result is None if the case has no cap, or if the
        cap applies only to the expert cache.
        """
        if case.cap is None or not self.on.caps_process:
            return None
        return int(case.cap * self.file_bytes)

    def shape(self) -> ModelShape:
        """Return the sizes of the model, for experts in the high precision.

        They are the number of layers, the number of experts per layer, and the bytes of each expert
        in memory.
        """
        return model_shape(self.model, (0,))

    @property
    def cap_words(self) -> str:
        """A title for tables of measurements under a memory cap, with a placeholder for the cap.

        An example is "expert cache with space for {:.0%} of the experts". The caller fills in the
        cap. If the option `caps_process` is True, the cap limits the memory of the process, and is
        a fraction of the model file's size. Otherwise, the cap limits only the expert cache, and is
        a fraction of the experts' size.
        """
        if self.on.caps_process:
            return "process memory limited to {:.0%} of the model file"
        return "expert cache with space for {:.0%} of the experts"

    def cap_settings(self, case: Case) -> dict[str, Any]:
        """Return the settings of our engine that apply the memory cap of a case.

        A case is a system under a memory cap.
        """
        limit = self.limit_bytes(case)
        if limit is not None:
            return {"ram": limit}
        return {} if case.cap is None else {"expert_ram": int(case.cap * self.model.tier_bytes[0])}

    def measure(self, case: Case, number: int) -> Result:
        """Measure a case (a system under a memory cap) once, in a child process with this cap.

        `number` is the number of the run. Returns the measurements, or {"error": reason}.
        """
        job = self.job(case, number)
        limit = self.limit_bytes(case)
        self.forget()
        if case.cap is not None and not self.on.caps_process:
            self.skip(
                "with --quick or --shape demo, --caps limits only moe-edge's memory for experts, "
                "and not the memory of upstream llama.cpp"
            )
        if limit is None:
            return self._spawn(job)
        with memory_group(limit) as group:
            if isinstance(group, str):
                reason = group
                self.skip(
                    f"the memory of the process cannot be limited: {reason}. Ignore the "
                    "table rows with mmap in their names, which need this limit"
                )
                return self._spawn(job)
            return self._spawn(job, partial(group.write_text, "0"))

    @staticmethod
    def _spawn(job: Job, enter: Callable[[], object] | None = None) -> Result:
        start_seconds = START_SECONDS if job.start_seconds is None else job.start_seconds
        seconds = start_seconds + 2 * sum(part.seconds for part in job.parts)
        return run_child("orchestrator.lab.bench.child", job, seconds, enter)

    def job(self, case: Case, number: int) -> Job:
        """Return the job of a child process that measures a case (a system under a memory cap).

        `number` is the number of the run.
        """
        on, settings = self.on, dict(case.settings)
        if case.role == "fewer":
            settings["experts_used"] = self.fewer_experts
        if case.system == "engine":
            settings["io_threads"] = on.io_threads
            settings |= self.cap_settings(case)
            if case.one_token:
                settings["expert_ram"] = token_slot_bytes(self.shape())
        return Job(
            system=case.system,
            model=str(self.file_of(case.tier)),
            low=str(self.low) if settings.get("low_tier") == LOW else None,
            settings=settings,
            n_ctx=on.n_ctx,
            n_ubatch=on.n_ubatch,
            threads=on.n_threads,
            parts=on.parts(),
            seed=on.seed * 1000 + number,
            text=str(DEMO_TEXT) if on.trained else None,
            warm=case.cap is None,
            sequences=on.sequences if case.system == "engine" else 0,
        )


def token_slot_bytes(shape: ModelShape) -> int:
    """Return the bytes of memory that hold the experts of one token in any one layer.

    The engine needs at least this memory for experts. Each layer replaces the experts of the layer
    before. A slot of this memory is only for matrices of one kind and size. If layers have
    different sizes, each size therefore needs slots of its own, and the result includes all of
    them.
    """
    sizes = {each for layer in shape.slots for each in layer[0].items()}
    return shape.n_expert_used * sum(size for _, size in sizes)
