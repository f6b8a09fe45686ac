"""`moe-edge bench prefill`: time to the first token by prompt length, and what a long prompt
does to the experts that decoding had in memory."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.bench.ablation import (
    CACHE_AHEAD,
    MIXED_AHEAD,
    SKIP_AHEAD,
    check_prefetch,
    paper_rows,
)
from orchestrator.bench.job import PROMPT, Part, decode, prompt, settle
from orchestrator.bench.loop import Loop
from orchestrator.bench.models import Note
from orchestrator.bench.plan import REFERENCE, BenchOptions, Case, global_lru
from orchestrator.bench.report import WIDTH, document, mix_of, percent, tokens_of
from orchestrator.bench.rows import (
    Result,
    failure,
    median_ms,
    median_ratio,
    named,
    store_figures,
)
from orchestrator.errors import ConfigError

ALL_SLOTS = "one, all slots"
BEFORE, LONG, AFTER = "before", "long", "after"
LONG_TOKENS, LONG_DEMO_TOKENS = 1024, 512  # the demo was trained on no more


@dataclass(frozen=True, slots=True)
class PrefillOptions(BenchOptions):
    """prompts: lengths in tokens, each measured `repeats` times, with `warmup` decode steps
    between two prompts, so that every one finds what decoding leaves in memory.

    Then: a short prompt and `tokens` decode steps, a prompt of long_tokens in chunks of ubatch,
    and `tokens` decode steps after it. long_tokens 0 leaves that away; None is 1024, for the
    demo 512. prefetch: as in the ablation. Raises ConfigError.
    """

    routing: str = "zipf"
    tokens: int = 32
    prompts: tuple[int, ...] = (8, 16, 32, 64, 128)
    repeats: int = 3
    long_tokens: int | None = None
    ubatch: int = 128
    prefetch: str = "on"

    def __post_init__(self) -> None:
        BenchOptions.__post_init__(self)
        if not self.prompts or min(self.prompts) < 2:
            raise ConfigError("prompts are lengths of at least 2 tokens, as 8,16,32")
        if len(set(self.prompts)) < len(self.prompts):
            raise ConfigError("prompts must differ")
        for name in ("repeats", "ubatch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1")
        if self.long_tokens is not None and self.long_tokens < 0:
            raise ConfigError("long_tokens must be at least 0")
        check_prefetch(self.prefetch)

    @property
    def long(self) -> int:
        """Tokens of the long prompt; 0 without one."""
        if self.long_tokens is not None:
            return self.long_tokens
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
        if self.long:
            parts += [prompt(self.prompts[0], "short"), between]
            parts += [decode(self.tokens, self.max_seconds / 3, BEFORE), prompt(self.long, LONG)]
            parts += [decode(self.tokens, self.max_seconds / 3, AFTER)]
        return parts


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


def run_prefill(options: PrefillOptions, note: Note = lambda text: None) -> dict[str, Any]:
    """Measures all cases and returns one JSON-ready object, as bench.run does."""
    loop = Loop.prepare(options, note)
    listed = prefill_cases(options)
    measured = loop.run(listed)
    rows = [
        prefill_row(options, case, measured.results[case.key], loop.limit_bytes(case))
        for case in listed
    ]
    _add_ratios(rows)
    report = loop.describe(measured)
    del report["options"]["prompt_tokens"]
    report["options"] |= {
        "prompts": list(options.prompts),
        "repeats": options.repeats,
        "long_tokens": options.long,
        "ubatch": options.ubatch,
        "prefetch": options.prefetch,
    }
    return report | {"cases": rows}


def prefill_row(
    options: PrefillOptions, case: Case, runs: list[Result], limit_bytes: int | None
) -> Result:
    """The figures of one case: {"prompts": [one for each length], "long": {...} or None}."""
    row: Result = {"name": case.name, "cap": case.cap, "limit_bytes": limit_bytes}
    if failed := failure(runs):
        return row | failed
    row["prompts"] = [_stretch(runs, prompt_name(n)) | {"tokens": n} for n in options.prompts]
    row["long"] = None
    if options.long:
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
_HEAD = (
    f"{'':16}{'tokens':>7}{'TTFT ms':>10}{'x one':>8}{'waited %':>10}{'hit %':>8}{'MB':>9}"
    f"{'hi/lo/skip %':>15}"
)
_LONG_HEAD = (
    f"{'':16}{'before ms':>10}{'after ms':>10}{'slower':>8}{'hit % before':>13}{'after':>7}"
    f"{'MB/tok before':>14}{'after':>7}{'long TTFT ms':>14}"
)


def render_prefill(report: dict[str, Any]) -> str:
    """The report of run_prefill as text."""
    options = report["options"]
    intro = [
        f"each prompt of {tokens_of(report)} tokens after decode steps of another conversation, "
        f"{options['repeats']} of each length a run;",
        f"{options['runs']} runs in turn, medians; 4/2 and 4/0 at r = {options['retention']}; "
        f"x one: against one precision;",
        f"{ALL_SLOTS}: the same without the rule that a prompt passes through a part of the slots",
    ]

    def section(rows: list[Result]) -> list[str]:
        lines = [_HEAD, *(line for row in rows for line in _prompt_lines(row))]
        if options["long_tokens"]:
            lines += ["", f"a prompt of {options['long_tokens']} tokens in chunks of "]
            lines[-1] += f"{options['ubatch']}, with {options['tokens']} decode steps on both sides"
            lines += [_LONG_HEAD, *(_long_line(row) for row in rows if "error" not in row)]
        return lines

    return document(report, intro, section)


def _name(row: Result) -> str:
    return f"{_SHORT.get(row['name'], row['name']):16}"


def _prompt_lines(row: Result) -> list[str]:
    if "error" in row:
        return [f"{_name(row)} {row['error']}"[:WIDTH]]
    return [
        f"{_name(row) if i == 0 else '':16}{each['tokens']:7}{each['ms']:10.1f}"
        f"{_times(each.get('speedup')):>8}{percent(each['waited']):>10}"
        f"{percent(each['hit_rate'], 1):>8}{each['bytes'] / 1e6:9.1f}{mix_of(each):>15}"
        for i, each in enumerate(row["prompts"])
    ]


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _long_line(row: Result) -> str:
    before, after, long = (row["long"][name] for name in (BEFORE, AFTER, LONG))
    return (
        f"{_name(row)}{before['ms']:10.2f}{after['ms']:10.2f}"
        f"{_times(row['long']['slower_after']):>8}{percent(before['hit_rate'], 1):>13}"
        f"{percent(after['hit_rate'], 1):>7}{before['bytes'] / 1e6:14.1f}"
        f"{after['bytes'] / 1e6:7.1f}{long['ms']:14.0f}"
    )
