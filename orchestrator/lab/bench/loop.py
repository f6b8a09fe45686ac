"""The loop that every benchmark shares: each case in processes of its own, in turn."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from gguf_tools.experts import ExpertModel
from orchestrator.allocation.slots import ModelShape
from orchestrator.cost import disk
from orchestrator.errors import ConfigError
from orchestrator.lab.bench import host
from orchestrator.lab.bench.cases import Case
from orchestrator.lab.bench.job import Job, longest_context
from orchestrator.lab.bench.models import DEMO_TEXT, HIGH, LOW, Note, build_models
from orchestrator.lab.bench.rows import Result
from orchestrator.lab.children import run_child
from orchestrator.memory.footprint import model_shape

START_SECONDS = 300.0

ShapeOf = Callable[[ExpertModel, tuple[int, ...]], ModelShape]


class Loop:
    """The cases of one benchmark on one model, which is made where it is not there yet.

    options: the benchmark's. bandwidths: what the disk delivered before each run; skipped: what
    could not be done. Raises MoeEdgeError where no model can be made, or where its context does not
    hold what is to be measured."""

    shape_of: ShapeOf = staticmethod(model_shape)

    def __init__(self, options: Any, note: Note) -> None:
        self.options, self.note = options, note
        self.high, self.low = build_models(options, (HIGH, LOW), note)
        self.model = ExpertModel.open(self.high, self.low)
        self.file_bytes = self.high.stat().st_size
        self.bandwidths: list[disk.Bandwidth] = []
        self.skipped: list[str] = []
        longest = longest_context(options.parts(), shared=False)
        most = self.model.hparams.context_length
        if most and longest > most:
            raise ConfigError(
                f"what is to be measured takes a context of {longest} tokens, the model "
                f"was made for {most}: ask for shorter prompts or fewer tokens"
            )

    def run(self, listed: Sequence[Case]) -> list[list[Result]]:
        """Measures all cases once, then all of them again, options.runs times: what a ratio
        compares ran within minutes of each other. Of each case what its runs came to; one that
        failed is not tried again."""
        options = self.options
        for case in listed:
            self.file_of(case.tier)  # a disk without room ends this before an hour of measuring
        results: list[list[Result]] = [[] for _ in listed]
        for number in range(options.runs):
            self.bandwidths.append(self.bandwidth(number))
            before = self.bandwidths[-1].bytes_per_s
            for case, earlier in zip(listed, results, strict=True):
                if any("error" in each for each in earlier):
                    continue
                self.note(f"run {number + 1} of {options.runs}: {case.key}")
                earlier.append(self.measure(case, number))
                if case.cap is not None and case.system == "engine":
                    after = self.probe(number).bytes_per_s
                    earlier[-1]["disk"], before = [before, after], after
        return results

    @property
    def text(self) -> str | None:
        """The file that tokens come from; without it they are random."""
        return str(DEMO_TEXT) if self.options.trained else None

    def skip(self, reason: str) -> None:
        if reason and reason not in self.skipped:
            self.skipped.append(reason)
            self.note(reason)

    def forget(self) -> None:
        """Takes the model out of the page cache; a quick pass leaves the machine alone."""
        if not self.options.quick:
            self.skip(host.forget_files([self.high, self.low]))

    def bandwidth(self, number: int) -> disk.Bandwidth:
        """What the disk delivers before a run."""
        return self.probe(number, 1.5)

    def probe(self, number: int, seconds: float = 0.5) -> disk.Bandwidth:
        """What the disk delivers at this moment: it is asked before and after each row that
        reads, since the speed of a shared disk changes."""
        seconds = 0.1 if self.options.quick else seconds
        self.forget()
        return disk.read_bandwidth(
            self.model, threads=self.options.io_threads, seconds=seconds, seed=number
        )

    @property
    def fewer_experts(self) -> tuple[str, int]:
        """(metadata key, number): as many experts a token as are left of them at `retention`."""
        used = self.model.n_expert_used
        architecture = self.model.metadata["general.architecture"]
        fewer = min(used - 1, round(used * self.options.retention))
        return f"{architecture}.expert_used_count", max(1, fewer)

    def file_of(self, tier: str | None) -> Path:
        """The model with all experts of this type, None for the high precision; it is written
        where it is not there yet."""
        if tier is None:
            return self.high
        return build_models(self.options, (tier,), self.note)[0]

    def limit_bytes(self, case: Case) -> int | None:
        """The cap on the whole process; None without one."""
        if case.cap is None or not self.options.caps_process:
            return None
        return int(case.cap * self.file_bytes)

    @property
    def cap_words(self) -> str:
        """What a cap is, for a title."""
        if self.options.caps_process:
            return "whole process within {:.0%} of the file"
        return "expert slots of {:.0%} of the experts"

    def cap_settings(self, case: Case) -> dict[str, Any]:
        """What holds our engine to the cap of a case."""
        limit = self.limit_bytes(case)
        if limit is not None:
            return {"ram": limit}
        return {} if case.cap is None else {"expert_ram": int(case.cap * self.model.tier_bytes[0])}

    def measure(self, case: Case, number: int) -> Result:
        """One process of one case: what it measured, or {"error": reason}."""
        job = self.job(case, number)
        limit = self.limit_bytes(case)
        self.forget()
        if case.cap is not None and not self.options.caps_process:
            self.skip("small model: the expert slots are capped, not the process; nor upstream")
        if limit is None:
            return self._spawn(job)
        with host.memory_group(limit) as group:
            if isinstance(group, str):
                self.skip(f"memory is not capped: {group}; mmap figures are of no use then")
                return self._spawn(job)
            return self._spawn(job, partial(group.write_text, "0"))

    @staticmethod
    def _spawn(job: Job, enter: Callable[[], object] | None = None) -> Result:
        seconds = START_SECONDS + 2 * job.decode_seconds
        return run_child("orchestrator.lab.bench.child", json.dumps(asdict(job)), seconds, enter)

    def job(self, case: Case, number: int) -> Job:
        """What the process of a case is told."""
        options = self.options
        settings = dict(case.settings)
        if case.role == "fewer":
            settings["experts_used"] = self.fewer_experts
        if case.system == "engine":
            settings["io_threads"] = options.io_threads
            settings["sequences"] = options.sequences
            settings |= self.cap_settings(case)
            if case.one_token:
                settings["expert_ram"] = token_slot_bytes(self.model, self.shape_of)
        return Job(
            system=case.system,
            model=str(self.file_of(case.tier)),
            low=str(self.low) if settings.get("low_tier") == LOW else None,
            settings=settings,
            n_ctx=options.n_ctx,
            n_ubatch=options.n_ubatch,
            threads=options.n_threads,
            parts=options.parts(),
            seed=options.seed * 1000 + number,
            text=self.text,
            warm=case.cap is None,
        )


def token_slot_bytes(model: ExpertModel, shape_of: ShapeOf = model_shape) -> int:
    """Expert slots for the experts of one token in one layer, each matrix kind once, shared by
    all layers: the fewest with which an op never waits for a slot. shape_of: of the memory that
    the slots are in."""
    shape = shape_of(model, (0,))
    sizes = {each for layer in shape.slots for each in layer[0].items()}
    return model.n_expert_used * sum(size for _, size in sizes)
