"""`moe-edge bench`: upstream and all policies under memory caps, compared with a bound."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from orchestrator.config import MOST_SEQUENCES, Config, policy_name
from orchestrator.lab.bench.benchmark import Benchmark
from orchestrator.lab.bench.cases import (
    REFERENCE,
    RESIDENT,
    Case,
    foreign_policies,
    mapped,
    policies,
    uniform,
)
from orchestrator.lab.bench.child import DECODE, Part
from orchestrator.lab.bench.models import tier_expert_bytes, uniform_tiers
from orchestrator.lab.bench.options import BenchOptions
from orchestrator.lab.bench.rows import (
    HIT,
    MIX,
    NAME,
    SLOWEST,
    TOKENS,
    TTFT,
    Result,
    add_bound,
    add_ratio,
    best_runs,
    caps_of,
    moved,
    named,
    step,
)
from orchestrator.lab.table import Column, fixed, percent
from orchestrator.plan.planning import scratch_bytes
from orchestrator.settings import MORE, setting

# Types that llama.cpp repacks while it loads a model. Repacking needs memory for one more tensor.
_REPACKED = ("q4_k", "q2_k")


@dataclass(frozen=True)
class CapOptions(BenchOptions):
    """Options of `moe-edge bench`, which compares systems under memory caps.

    `together` is the number of sequences that continue from the same prompt and decode in one
    batch. `policy` is a further policy to measure. Raises ConfigError for an invalid value.
    """

    together: int = setting(
        1,
        "Number of sequences that decode in one batch. Each step decodes one token of each "
        "sequence.",
        within=(1, MOST_SEQUENCES),
    )
    policy: str | None = setting(
        None, "Also measure this policy, given by its name or as module:Class.", group=MORE
    )

    @property
    def extra_policy(self) -> str | None:
        """The name of a policy that is measured in addition to our own policies, or None.

        It is the policy of the option `policy`. Raises SettingError or PolicyError if this policy
        is unknown.
        """
        return policy_name(self.policy)

    def parts(self) -> list[Part]:
        *before, last = super().parts()
        return [*before, last._replace(sequences=self.together if self.together > 1 else 0)]


class Computing(NamedTuple):
    """Compute time per token of upstream llama.cpp with all experts in memory, in milliseconds.

    The first three fields have one value for each run of the benchmark. `low` and `fewer` are empty
    if they were not measured.

    - high: all experts in the high precision.
    - low: all experts in the low precision.
    - fewer: fewer experts per token, in the high precision.
    - fewer_share: the number of experts per token in `fewer`, as a fraction of the usual number.
    """

    high: Sequence[float]
    low: Sequence[float]
    fewer: Sequence[float]
    fewer_share: float

    def of_mix(self, run: int, mix: Mapping[str, float]) -> float:
        """Estimate the compute time per token if some experts have low precision or are skipped.

        The result is in milliseconds. It is interpolated from three times, measured in the
        benchmark's run number `run`:

            high - mix["low"] * (high - low) - mix["skip"] * (high - fewer) / (1 - fewer_share)

        - high: self.high[run], the time with all experts in the high precision.
        - low: self.low[run], the time with all experts in the low precision.
        - fewer: self.fewer[run], the time if a token uses only the fraction `fewer_share` of its
          experts.
        - mix: the fraction of experts with low precision ("low"), and of skipped experts ("skip").

        A difference that was not measured, or is negative, counts as 0.
        """
        high = self.high[run]
        found = high
        if self.low:
            found -= mix["low"] * max(0.0, high - self.low[run])
        if self.fewer and self.fewer_share < 1:
            saved = max(0.0, high - self.fewer[run]) / (1 - self.fewer_share)
            found -= mix["skip"] * saved
        return max(0.0, found)


def computing(rows: Sequence[Result], fewer_share: float) -> Computing:
    """Collect upstream llama.cpp's compute times per token with everything in memory.

    The result has three lists, each with one time in milliseconds for each run (repetition) of the
    benchmark. Each list is from the rows with one role and without a memory cap:

    - high: role "upstream", all experts in the high precision.
    - low: role "low", all experts in the low precision.
    - fewer: role "fewer", fewer experts per token.

    If several rows have the same role, their times of the same run are compared, and the smallest
    is used.

    - rows: the rows of the benchmark's table.
    - fewer_share: experts per token in the role "fewer", divided by the usual number. This number
      is copied to the result.
    """
    high, low, fewer = (
        best_runs([row for row in rows if row["cap"] is None and row["role"] == role])
        for role in ("upstream", "low", "fewer")
    )
    return Computing(high, low, fewer, fewer_share)


def add_disk_bound(row: Result, runs: Sequence[Result], compute: Computing) -> None:
    """Add a lower bound of the time per token to a table row, and the measured disk bandwidths.

    A step takes at least its compute time, which `compute` estimates. It also takes at least the
    time to read the experts that are not in memory, at the highest disk bandwidth that was
    observed. `runs` are the measurements of the row.
    """
    waits, reads, probes = [], [], []
    for run in runs:
        parts = named(run, DECODE)
        seconds = sum(sum(part["ms"]) for part in parts) / 1e3
        reads.append(sum(part["store"]["bytes"] for part in parts) / seconds)
        probes += run["disk"]
        fastest = max(reads[-1], *run["disk"])
        waits.append([each / fastest * 1e3 for part in parts for each in step_bytes(part)])
    add_bound(row, [compute.of_mix(at, row["mix"]) for at in range(len(runs))], waits)
    row |= {"read_bytes_per_s": statistics.median(reads), "probe_bytes_per_s": probes}


def step_bytes(part: Result) -> list[float]:
    """Return the estimated number of bytes that each decode step needed from the disk.

    Bytes that were read on demand count fully. Prefetched bytes are multiplied by the fraction of
    all prefetches that a token used. part: the measurements of the steps. The result has one number
    for each step.
    """
    used = part["store"]["used_ahead"]
    return [demand + used * ahead for demand, ahead in part["step_reads"]]


class Caps(Benchmark):
    """Compares the speed of upstream llama.cpp and of some of our policies under memory caps."""

    options = CapOptions
    columns = (
        NAME,
        TOKENS,
        step(1),
        SLOWEST,
        TTFT,
        HIT,
        moved(),
        MIX,
        Column("of bound", "of_bound", percent(0, " %")),
        Column("x mmap", "speedup_mmap", fixed(1)),
    )

    def cases(self) -> list[Case]:
        """Return the cases to measure: first with everything in memory, then under each memory cap.

        A case is one system, with its settings, under one memory cap. The systems under a cap are
        upstream llama.cpp, our engine with each policy, and llama.cpp with all experts in a smaller
        type. For each cap, this type is the largest with which the whole model fits in memory.

        If several sequences decode in one batch, only our engine is measured.
        """
        options = self.on
        if options.together > 1:
            listed = [REFERENCE]
            for cap in options.caps:
                listed += policies(cap, options.retention)
                listed += foreign_policies(cap, options.extra_policy)
            return listed
        listed = [*RESIDENT]
        for cap in options.caps:
            repacked = {"mmap": True, "extra_bufts": True}
            listed += [
                mapped(cap),
                Case("upstream mmap, repack", "upstream", cap, "", repacked),
                *policies(cap, options.retention),
                *foreign_policies(cap, options.extra_policy),
            ]
            tier = self.largest_whole(cap)
            if tier is None:
                self.skip(
                    f"upstream llama.cpp with all experts in one quantization type is not "
                    f"measured: no type is small enough for the memory limit of {cap:.0%} (--caps)"
                )
            else:
                listed.append(uniform(cap, tier))
        return listed

    def largest_whole(self, cap: float) -> str | None:
        """Return the largest type of experts with which the whole model fits under a memory cap.

        A type is a quantization such as "q4_k". The result is None if no type is small enough.

        - cap: the memory cap. If the option `caps_process` is True, `cap` is a fraction of the
          model file's size, and limits the memory of the whole process. Otherwise, `cap` is a
          fraction of the experts' size, and limits only the experts.
        """
        model, options = self.model, self.on
        config = Config.build(model=self.high, ctx=options.n_ctx, ubatch=options.n_ubatch)
        fixed = model.dense_bytes + model.kv_bytes(options.n_ctx) + scratch_bytes(model, config)
        for tier in uniform_tiers(options):
            experts = tier_expert_bytes(model, tier)
            if experts is None:
                continue
            tensor = experts // (3 * model.n_layers) if tier in _REPACKED else 0
            taken, whole = fixed + experts + tensor, self.file_bytes
            if not options.caps_process:
                taken, whole = experts, model.tier_bytes[0]
            if taken <= cap * whole:
                return tier
        return None

    def compare(self, rows: Sequence[Result], runs: Sequence[Sequence[Result]]) -> None:
        compute = computing(rows, self.fewer_experts[1] / self.model.n_expert_used)
        for row, each in zip(rows, runs, strict=True):
            if compute.high and "error" not in row and "disk" in each[0]:
                add_disk_bound(row, each, compute)
        add_ratio(rows, "of_resident", [row for row in rows if row["role"] == "reference"])
        for same in caps_of(rows):
            add_ratio(same, "speedup_mmap", [row for row in same if row["role"] == "mmap"])

    def intro(self) -> list[str]:
        options = self.on
        rows = [
            "Each row of a table is one system: upstream llama.cpp, or moe-edge with one policy.",
            f"All systems decode {options.tokens} steps after the same prompt of "
            f"{options.prompt_tokens} tokens (kind of tokens: {options.words}).",
            f"Number of measurements of each system: {options.runs}. The systems take turns.",
            "Speeds are those of the median step.",
            f"On average, the policy dymoe keeps {options.retention:.1%} of the experts in the "
            f"high precision (--retention).",
        ]
        if options.together > 1:
            return [
                *rows,
                f"Each step decodes one token for each of {options.together} sequences.",
            ]
        return [
            *rows,
            'The column "x mmap" is the speed-up over the row "upstream mmap".',
            'The column "of bound" is the measured speed as a share of the highest possible speed. '
            "At the highest possible speed, a step takes as long as its compute time or its read "
            "time, whichever is longer.",
            "Compute time of a step: the time of upstream llama.cpp with everything in memory, "
            "minus the time that skipped and low-precision experts save.",
            "Read time of a step: the time to read the step's missing experts at the highest disk "
            "speed that was measured before, during or after the measurement of the row's system.",
            f'The rows "fewer experts" use {self.fewer_experts[1]} instead of '
            f"{self.model.n_expert_used} experts per token.",
            'The rows "all TYPE" are upstream llama.cpp with all experts in one quantization type. '
            "Under a memory cap, TYPE is the largest type with which the whole model fits.",
            "Quality cannot be measured with random weights: see docs/quality.md",
        ]

    def notes(self, rows: Sequence[Result]) -> list[str]:
        """Return the footnotes of a table, such as the memory use of our engine (see row_notes).

        For batched decoding, they also give the speed of each row under a memory cap, relative to
        the speed with all experts in memory.
        """
        return super().notes(rows) + [
            f"{row['name']}: {row['of_resident']:.2f} times the speed with everything in memory"
            for row in rows
            if {"budget_bytes", "of_resident"} <= row.keys() and row["cap"]
            if "bound_tpot_ms" not in row
        ]
