"""`moe-edge bench prefill`: time to the first token by prompt length, and what a long prompt
does to the experts that decoding had in memory."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.lab.bench.ablation import (
    CACHE_AHEAD,
    MIXED_AHEAD,
    SKIP_AHEAD,
    AblationOptions,
    paper_rows,
)
from orchestrator.lab.bench.benchmark import Benchmark
from orchestrator.lab.bench.cases import REFERENCE, Case, global_lru
from orchestrator.lab.bench.job import PROMPT, Part, decode, prompt, settle
from orchestrator.lab.bench.loop import Loop, Measured
from orchestrator.lab.bench.options import BenchOptions
from orchestrator.lab.bench.report import HIT, MB, MIX, by_cap, tokens_of
from orchestrator.lab.bench.rows import (
    Result,
    failure,
    median_ms,
    median_ratio,
    named,
    store_figures,
)
from orchestrator.lab.lists import numbers
from orchestrator.lab.table import Column, Table, fixed, percent
from orchestrator.settings import FROM_0, FROM_1, again, setting

ALL_SLOTS = "one, all slots"
BEFORE, LONG, AFTER = "before", "long", "after"
KEYS = ("ms", "hit_rate", "bytes")  # what is shown of each
LONG_TOKENS, LONG_DEMO_TOKENS = 1024, 512  # the demo was trained on no more


@dataclass(frozen=True)
class PrefillOptions(BenchOptions):
    """prompts: lengths in tokens, each measured `repeats` times, with `warmup` decode steps
    between two prompts, so that every one finds what decoding leaves in memory.

    Then: a short prompt and `tokens` decode steps, a prompt of `long` tokens in chunks of
    ubatch, and `tokens` decode steps after it. long 0 leaves that away; None is 1024, for the demo
    512. prefetch: as in the ablation. Raises ConfigError.
    """

    routing: str = again(BenchOptions, "routing", "zipf")
    tokens: int = again(BenchOptions, "tokens", 32)
    prompt_tokens: int = again(BenchOptions, "prompt_tokens", option=False)
    prompts: tuple[int, ...] = setting(
        (8, 16, 32, 64, 128),
        "Prompt lengths in tokens.",
        notation=numbers("prompt lengths"),
    )
    repeats: int = setting(3, "Prompts of each length in one run.", within=FROM_1)
    long: int | None = setting(
        None,
        "Length of a prompt in the middle of decoding, 0 for none.",
        within=FROM_0,
        shown=f"{LONG_TOKENS}; {LONG_DEMO_TOKENS} for the demo",
    )
    ubatch: int = setting(128, "Tokens of a prompt that are evaluated at once.", within=FROM_1)
    prefetch: str = again(AblationOptions, "prefetch")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.prompts or min(self.prompts) < 2:
            raise ConfigError("prompts are lengths of at least 2 tokens, as 8,16,32")
        if len(set(self.prompts)) < len(self.prompts):
            raise ConfigError("prompts must differ")

    @property
    def long_tokens(self) -> int:
        """Tokens of the long prompt; 0 without one."""
        if self.long is not None:
            return self.long
        return LONG_DEMO_TOKENS if self.trained else LONG_TOKENS

    @property
    def n_ubatch(self) -> int:
        return self.ubatch

    def parts(self) -> list[Part]:
        between = settle(self.warmup, self.max_seconds / 3)
        parts = [prompt(self.prompts[0], "cold"), between]
        for _ in range(self.repeats):
            for n in self.prompts:
                parts += [prompt(n, prompt_name(n)), between]
        if self.long_tokens:
            seconds = self.max_seconds / 3
            parts += [prompt(self.prompts[0], "short"), between]
            parts += [decode(self.tokens, seconds, BEFORE), prompt(self.long_tokens, LONG)]
            parts += [decode(self.tokens, seconds, AFTER)]
        return parts

    def described(self, *more: str) -> dict[str, Any]:
        found = super().described("prompts", "repeats", "ubatch", "prefetch", *more)
        del found["prompt_tokens"]
        return found | {"long_tokens": self.long_tokens}


def prompt_name(n: int) -> str:
    """The name of the parts that are prompts of n tokens."""
    return f"{PROMPT} {n}"


def prefill_cases(options: PrefillOptions) -> list[Case]:
    """Everything in memory; then, under each cap, the null baseline and rows 3, 5 and 6 of the
    ablation: one precision, 4/2 and 4/0, all with look-ahead; and one precision where a prompt
    takes all slots instead of passing through some."""
    listed = [REFERENCE]
    for cap in options.caps:
        listed.append(global_lru(cap))
        for case in paper_rows(cap, options.retention, options.prefetch):
            if case.name in (CACHE_AHEAD, MIXED_AHEAD, SKIP_AHEAD):
                listed.append(case)
            if case.name == CACHE_AHEAD:
                settings = case.settings | {"prompts_pass": False}
                listed.append(replace(case, name=ALL_SLOTS, settings=settings))
    return listed


class Prefill(Benchmark[Loop[PrefillOptions]]):
    """Prompts of several lengths, and a long one in the middle of decoding."""

    options = PrefillOptions
    listed = staticmethod(prefill_cases)

    def figures(self, loop: Loop[PrefillOptions], measured: Measured) -> Result:
        rows = [
            prefill_row(loop.options, case, runs, loop.limit_bytes(case))
            for case, runs in measured.each()
        ]
        _add_ratios(rows)
        return {"cases": rows}

    def intro(self, report: Result) -> list[str]:
        options = report["options"]
        return [
            f"each prompt of {tokens_of(report)} tokens after decode steps of another "
            f"conversation, {options['repeats']} of each length a run; {options['runs']} runs in "
            f"turn, medians; 4/2 and 4/0 at r = {options['retention']}; x one: against one "
            f"precision; {ALL_SLOTS}: the same without the rule that a prompt passes through a "
            "part of the slots",
        ]

    def tables(self, report: Result) -> list[Table]:
        options = report["options"]
        long = (
            f"a prompt of {options['long_tokens']} tokens in chunks of {options['ubatch']}, with "
            f"{options['tokens']} decode steps on both sides"
        )
        found = []
        for title, rows in by_cap(report):
            found.append(Table(title, COLUMNS, [line for row in rows for line in _by_prompt(row)]))
            if options["long_tokens"]:
                good = [_long_line(row) for row in rows if "error" not in row]
                found.append(Table(long, LONG_COLUMNS, good))
        return found


def prefill_row(
    options: PrefillOptions, case: Case, runs: list[Result], limit_bytes: int | None
) -> Result:
    """The figures of one case: {"prompts": [one for each length], "long": {...} or None}."""
    row: Result = {"name": case.name, "cap": case.cap, "limit_bytes": limit_bytes}
    if failed := failure(runs):
        return row | failed
    row["prompts"] = [_stretch(runs, prompt_name(n)) | {"tokens": n} for n in options.prompts]
    row["long"] = None
    if options.long_tokens:
        row["long"] = {name: _stretch(runs, name) for name in (BEFORE, LONG, AFTER)}
    return row


def _stretch(runs: list[Result], name: str) -> Result:
    """Medians of the parts of one name: of their times, and of what the store did meanwhile.

    waited is the share of the time in which the experts were waited for.
    """
    by_run = median_ms(runs, name)
    parts = [part for run in runs for part in named(run, name)]
    found = store_figures(parts)
    row: Result = {"ms": statistics.median(by_run), "ms_runs": by_run}
    if found:
        spent_ms = sum(sum(part["ms"]) for part in parts)
        row |= {
            "hit_rate": found["hit_rate"],
            "bytes": found["bytes"] / sum(len(part["ms"]) for part in parts),
            "waited": found["wait_ms_per_token"] * sum(part["tokens"] for part in parts) / spent_ms,
            "mix": found["mix"],
        }
    return row


def _add_ratios(rows: list[Result]) -> None:
    """How much sooner than with one precision the first token comes, under the same cap; and
    how much slower decoding is after the long prompt than before it."""
    good = [row for row in rows if "error" not in row]
    for row in good:
        base = next(
            (each for each in good if (each["name"], each["cap"]) == (CACHE_AHEAD, row["cap"])),
            None,
        )
        if base is not None:
            for mine, theirs in zip(row["prompts"], base["prompts"], strict=True):
                mine["speedup"] = median_ratio(theirs["ms_runs"], mine["ms_runs"])
        long = row["long"]
        if long is not None:
            long["slower_after"] = median_ratio(long[AFTER]["ms_runs"], long[BEFORE]["ms_runs"])


_SHORT = {
    CACHE_AHEAD: "one precision",
    MIXED_AHEAD: "4/2",
    SKIP_AHEAD: "4/0",
    REFERENCE.name: "all in memory",
}
NAME = Column("", lambda row: _SHORT.get(row["name"], row["name"]), left=True)
COLUMNS = (
    NAME,
    Column("tokens", "tokens"),
    Column("TTFT", "ms", fixed(1), "ms"),
    Column("x one", "speedup", fixed(2)),
    Column("waited", "waited", percent(), "%"),
    HIT,
    Column("MB", "bytes", fixed(1, MB)),
    MIX,
)
LONG_COLUMNS = (
    NAME,
    Column("before", "before ms", fixed(2), "ms"),
    Column("after", "after ms", fixed(2), "ms"),
    Column("slower", "slower_after", fixed(2)),
    Column("hit % before", "before hit_rate", percent(1)),
    Column("after", "after hit_rate", percent(1)),
    Column("MB/tok before", "before bytes", fixed(1, MB)),
    Column("after", "after bytes", fixed(1, MB)),
    Column("long TTFT", "long ms", fixed(0), "ms"),
)


def _by_prompt(row: Result) -> list[Result]:
    """A row for each length of prompt, the first one with the name of the case."""
    if "error" in row:
        return [row]
    return [{"name": "" if i else row["name"]} | each for i, each in enumerate(row["prompts"])]


def _long_line(row: Result) -> Result:
    """The figures around the long prompt under names of their own, "before ms" and so on."""
    long = row["long"]
    parts = {f"{name} {key}": long[name].get(key) for name in (BEFORE, LONG, AFTER) for key in KEYS}
    return {"name": row["name"], "slower_after": long["slower_after"]} | parts
