"""`moe-edge bench ablation`: what each part of DyMoE brings (the paper's Table 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.lab.bench.benchmark import Benchmark
from orchestrator.lab.bench.cases import ON_DEMAND, REFERENCE, Case, global_lru, mapped, paper_rows
from orchestrator.lab.bench.child import COLD, Part, decode, prompt, settle
from orchestrator.lab.bench.options import BenchOptions
from orchestrator.lab.bench.rows import HIT, MIX, NAME, SLOWEST, Result, add_ratio, caps_of, moved
from orchestrator.lab.table import Column, fixed, percent
from orchestrator.settings import FROM_1, again, setting


@dataclass(frozen=True)
class AblationOptions(BenchOptions):
    """turns: prompts after the first one, each followed by its share of the decode steps.

    The first prompt finds empty slots (cold); the others find what decoding left there, as
    the second question of a chat does. Each starts a conversation of its own. Raises ConfigError.
    """

    routing: str = again(BenchOptions, "routing", "zipf")
    tokens: int = again(BenchOptions, "tokens", 96)
    prompt_tokens: int = again(BenchOptions, "prompt_tokens", 32)
    runs: int = again(BenchOptions, "runs", 3)
    turns: int = setting(
        3, "Prompts of one process after a first one; they share the decode steps.", within=FROM_1
    )

    def parts(self) -> list[Part]:
        steps, seconds = -(-self.tokens // self.turns), self.max_seconds / self.turns
        turn = [prompt(self.prompt_tokens), decode(steps, seconds)]
        first = [prompt(self.prompt_tokens, COLD), settle(self.warmup, self.max_seconds / 3)]
        return first + turn * self.turns


def add_over_demand(rows: Sequence[Result]) -> None:
    """How much faster than load on demand under the same cap."""
    for same in caps_of(rows):
        demand = [row for row in same if row["name"] == ON_DEMAND]
        add_ratio(same, "speedup_tpot", demand)
        add_ratio(same, "speedup_ttft", demand, "ttft_ms_runs")


class Ablation(Benchmark):
    """The parts of DyMoE, one after the other."""

    options = AblationOptions
    columns = (
        NAME,
        Column("TTFT", "ttft_ms", fixed(1), "ms"),
        Column("x row 1", "speedup_ttft", fixed(2)),
        Column("cold", "ttft_cold_ms", fixed(1), "ms"),
        Column("TPOT", "tpot_ms_p50", fixed(2), "ms"),
        Column("x row 1", "speedup_tpot", fixed(2)),
        SLOWEST,
        HIT,
        moved(),
        MIX,
    )

    def cases(self) -> list[Case]:
        """Everything in memory; then, under each cap, upstream (where there is a cap on it), our
        null baseline, and the six rows."""
        options, listed = self.on, [REFERENCE]
        for cap in options.caps:
            listed += [mapped(cap)] if options.caps_process else []
            listed += [global_lru(cap), *paper_rows(cap, options.retention)]
        return listed

    def compare(self, rows: Sequence[Result], runs: Sequence[Sequence[Result]]) -> None:
        add_over_demand(rows)

    def intro(self) -> list[str]:
        options = self.on
        return [
            f"{options.turns} prompts of {options.prompt_tokens} {options.words} tokens, each "
            f"followed by its share of {options.tokens} decode steps; cold: one before them, into "
            f"empty slots. {options.runs} runs in turn, medians; 4/2 and 4/0 at r = "
            f"{options.retention}",
            "the paper's speed-ups in TPOT over row 1: row 5 x 2.43, row 6 x 2.67",
        ]

    def notes(self, rows: Sequence[Result]) -> list[str]:
        """With how many of the next layer's experts were foreseen while decoding, by layer."""
        lines = super().notes(rows)
        for row in rows:
            recall = row.get("policy", {}).get("recall") or []
            if any(share is not None for share in recall):
                text = " ".join("-" if share is None else percent()(share) for share in recall)
                lines.append(f"{row['name']}: recall of the look-ahead by layer in %: {text}")
        return lines
