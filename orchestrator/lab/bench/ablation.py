"""`moe-edge bench ablation`: the contribution of each part of DyMoE (the paper's Table 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.lab.bench.benchmark import Benchmark
from orchestrator.lab.bench.cases import ON_DEMAND, REFERENCE, Case, global_lru, mapped, paper_rows
from orchestrator.lab.bench.child import COLD, Part, decode, prompt, settle
from orchestrator.lab.bench.options import BenchOptions
from orchestrator.lab.bench.rows import HIT, MIX, NAME, SLOWEST, Result, add_ratio, caps_of, moved
from orchestrator.lab.table import Column, fixed, percent
from orchestrator.settings import FROM_1, inherit, setting


@dataclass(frozen=True)
class AblationOptions(BenchOptions):
    """Options of the ablation.

    `turns` is the number of prompts after the first one. Each is followed by its part of the decode
    steps. The first prompt starts with empty slots (cold). The others start with the experts that
    decoding left in memory, like the second question of a chat, but in a new conversation. Raises
    ConfigError.
    """

    routing: str = inherit(BenchOptions, "routing", "zipf")
    tokens: int = inherit(BenchOptions, "tokens", 96)
    prompt_tokens: int = inherit(BenchOptions, "prompt_tokens", 32)
    runs: int = inherit(BenchOptions, "runs", 3)
    turns: int = setting(
        3, "Prompts per process after a first one; they share the decode steps.", within=FROM_1
    )

    def parts(self) -> list[Part]:
        steps, seconds = -(-self.tokens // self.turns), self.max_seconds / self.turns
        turn = [prompt(self.prompt_tokens), decode(steps, seconds)]
        first = [prompt(self.prompt_tokens, COLD), settle(self.warmup, self.max_seconds / 3)]
        return first + turn * self.turns


def add_over_demand(rows: Sequence[Result]) -> None:
    """Add the speed-up over load on demand under the same cap to each row."""
    for same in caps_of(rows):
        demand = [row for row in same if row["name"] == ON_DEMAND]
        add_ratio(same, "speedup_tpot", demand)
        add_ratio(same, "speedup_ttft", demand, "ttft_ms_runs")


class Ablation(Benchmark):
    """Compares the parts of DyMoE, each row adding one."""

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
        """Return the reference with everything in memory, and the rows of each cap.

        Under each cap, these are upstream (if the cap applies to the whole process), the global LRU
        baseline and the paper's six rows.
        """
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
            f"followed by its share of {options.tokens} decode steps; cold: a first prompt with "
            f"empty slots. Medians of {options.runs} alternating runs; 4/2 and 4/0 at r = "
            f"{options.retention}",
            "TPOT speed-ups over row 1 in the paper: row 5 x 2.43, row 6 x 2.67",
        ]

    def notes(self, rows: Sequence[Result]) -> list[str]:
        """Add the look-ahead's recall per layer.

        The recall is the fraction of the used experts that were predicted during decode.
        """
        lines = super().notes(rows)
        for row in rows:
            recall = row.get("policy", {}).get("recall") or []
            if any(share is not None for share in recall):
                text = " ".join("-" if share is None else percent()(share) for share in recall)
                lines.append(f"{row['name']}: look-ahead recall per layer in %: {text}")
        return lines
