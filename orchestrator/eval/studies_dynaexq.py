"""The studies of DynaExq: what demotion costs (Figure 3), and what a hot set
wins back in the same memory (Table 4)."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from gguf_tools.experts import ExpertModel
from orchestrator import profile
from orchestrator.config import Config
from orchestrator.engine import Engine
from orchestrator.errors import ConfigError
from orchestrator.eval import arithmetic, plot
from orchestrator.eval.arithmetic import Estimate
from orchestrator.eval.compare import Part, Reference
from orchestrator.eval.policies import Counts
from orchestrator.eval.report import Table, change, percent, with_error
from orchestrator.eval.run import pair
from orchestrator.eval.subject import Row, Subject
from orchestrator.eval.text import Window
from orchestrator.footprint import model_shape
from orchestrator.policy.dynaexq import DynaExq
from orchestrator.policy.versions import HIGH, LOW, resident_plan

SEEDS = (1, 2, 3)
STEPS = 8  # points of a curve, besides its start
HELD = (0.25, 0.5, 0.75)  # shares of the experts that a budget holds high
GOAL = 1.3
COLD, RANDOM, HOT = "cold first", "at random", "hot first"
EMPTY, STARTED, FIXED, NULL = (
    "cold start",
    "started with the first half's hotness",
    "the same, never adapting",
    "random hot set, never adapting",
)
MIXED = "mixed"


def halves(windows: Sequence[Window]) -> tuple[list[Window], list[Window]]:
    """Each domain's first half, for the hotness, and its second one, to be scored; both in the
    text's order. Raises ConfigError where a domain is a single window."""
    left = {window.domain: 0 for window in windows}
    for window in windows:
        left[window.domain] += window.n_scored
    total, most = dict(left), {window.domain: window for window in windows}
    parts: tuple[list[Window], list[Window]] = ([], [])
    seen: set[str] = set()
    for window in windows:
        domain = window.domain
        if window is most[domain] and domain not in seen:
            named = f"the domain '{domain}'" if domain else "the text"
            raise ConfigError(
                f"{named} is one window, which cannot be both measured for hotness and scored: "
                f"raise --tokens or lower --window"
            )
        # the last window is always scored, the first one never
        first = window is not most[domain] and (
            domain not in seen or 2 * left[domain] > total[domain]
        )
        parts[0 if first else 1].append(window)
        left[domain] -= window.n_scored
        seen.add(domain)
    return parts


class Residency:
    """What a study of DynaExq does with its subject: the high and the low tier of it, all experts
    in memory in one of the two, whatever --ram says."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        with self._model() as model:
            names = [tier.name for tier in model.tiers]
            tiers = (names.index(subject.high), names.index(subject.low))
            self.shape = model_shape(model, tiers)

    def _model(self) -> ExpertModel:
        return ExpertModel.open(self.subject.config.model, self.subject.config.low)

    @property
    def n_expert(self) -> int:
        return self.shape.n_expert

    def uniform_bytes(self, tier: int) -> int:
        """Slot bytes of every expert in one of the two tiers."""
        return self.shape.all_slot_bytes(tier)

    def budget_bytes(self, n_high: int) -> int:
        """The least budget that holds n_high experts of each layer high, and what swaps need."""
        found = resident_plan(self.shape, 2 * self._plenty, n_high)
        if found is None:
            raise ConfigError("the model has no experts to hold in two precisions")
        return found[0].total_bytes

    @cached_property
    def _plenty(self) -> int:
        return self.uniform_bytes(HIGH) + self.uniform_bytes(LOW)

    @contextmanager
    def open(self, n_high: int, hotness: np.ndarray | None, **settings: Any) -> Iterator[Engine]:
        """An engine with the n_high hottest experts of each layer high, the first ones without a
        hotness. hotness [n_layers, n_expert]."""
        wanted: dict[str, Any] = {
            "policy": "dynaexq",
            "high_tier": self.subject.high,
            "low_tier": self.subject.low,
            "ram": None,
            "expert_ram": self.budget_bytes(n_high),
            "hot_experts": n_high,
            **settings,
        }
        with tempfile.TemporaryDirectory() as folder:
            if hotness is not None:
                wanted["profile"] = Path(folder) / "hotness.json"
                with self._model() as model:
                    profile.save(wanted["profile"], model, hotness)
            with Engine.open(self.subject.config.with_changes(**wanted)) as engine:
                yield engine

    def fixed(self, label: str, n_high: int, hotness: np.ndarray | None) -> Row:
        """The subject's text with a hot set that never changes."""
        with self.open(n_high, hotness, update_steps=0) as engine:
            return self.subject.score_open(engine, label)

    def hotness(self, windows: Sequence[Window]) -> np.ndarray:
        """S as the policy would have it on the average over the windows, with every expert high:
        tokens of an interval routed to each expert, float64 [n_layers, n_expert]."""
        with self.open(self.n_expert, None, update_steps=0) as engine:
            counts = Counts(engine.policy)
            self.subject.on(windows).score_open(engine, "hotness", lambda own: counts)
        return counts.per_step * max(1, _interval(self.subject.config))

    def random(self, seed: int) -> np.ndarray:
        """A hotness that says nothing: an order of each layer's experts by chance."""
        rng = np.random.default_rng(seed)
        layers = range(self.shape.n_layers)
        return np.stack([rng.permutation(self.n_expert) + 1.0 for _ in layers])


def _interval(config: Config) -> int:
    """Decode steps between two updates of the hot sets."""
    return DynaExq.Settings.of(config.of_policies).update_steps


def _held_high(row: Row) -> float:
    return (row.usage.high or 0.0) if row.usage else 0.0


def demotion(subject: Subject, folder: Path) -> list[Table]:
    """Figure 3: perplexity over the number of demoted experts in each layer, by the order in which
    they are demoted."""
    first, second = halves(subject.windows)
    scored = subject.on(second)
    residency = Residency(scored)
    hotness = residency.hotness(first)
    n = residency.n_expert
    levels = sorted({round(n * step / STEPS) for step in range(STEPS + 1)})
    table = Table(
        f"Demoted experts of each layer, {subject.high} to {subject.low} (Figure 3): "
        f"{scored.basis}",
        ("demoted", "order", "routed to high", "perplexity", f"change from all {subject.high}"),
    )
    # Where none or all are demoted, the order does not matter.
    ends = {n_high: residency.fixed(f"{n - n_high} demoted", n_high, None) for n_high in (n, 0)}
    base = ends[n]

    def row_of(order: str, demoted: int) -> Row:
        n_high, label = n - demoted, f"{demoted} demoted, {order}"
        if n_high in ends:
            return ends[n_high]
        if order == RANDOM:
            rows = [residency.fixed(label, n_high, residency.random(seed)) for seed in SEEDS]
            usage = rows[0].usage
            if usage is not None:
                usage = replace(usage, high=sum(map(_held_high, rows)) / len(rows))
            return replace(rows[0].averaged(rows[1:]), usage=usage)
        scores = hotness if order == COLD else hotness.max() - hotness
        return residency.fixed(label, n_high, scores)

    with plot.figure(folder, "demotion") as (axis,):
        for number, order in enumerate((COLD, RANDOM, HOT)):
            changes = []
            for demoted in levels:
                row = row_of(order, demoted)
                changes.append(row.against(base))
                perplexity, found = pair(row.text.perplexity), pair(changes[-1])
                high = _held_high(row)
                table.rows.append(
                    (
                        f"{demoted} of {n}",
                        order,
                        f"{100 * high:.1f} %",
                        with_error(perplexity),
                        change(found),
                    )
                )
                table.data.append(
                    {
                        "demoted": demoted,
                        "order": order,
                        "routed_high": high,
                        "perplexity": perplexity,
                        "domains": {
                            name: pair(each) for name, each in row.text.by_domain().items()
                        },
                        "change": found,
                    }
                )
            plot.percent_line(axis, [float(each) for each in levels], changes, order, number)
        axis.set_xlabel(f"experts of each layer in {subject.low}, of {n}")
        axis.set_ylabel(f"perplexity against all {subject.high}, %")
        axis.set_title(scored.basis, fontsize=9)
        axis.legend()
    table.notes.append(
        f"Hotness: tokens routed to each expert in {subject.on(first).n_tokens} other tokens of "
        f"the same text, every expert in {subject.high}. Residency does not change while the text "
        f"is read. {RANDOM}: mean log-likelihood of {len(SEEDS)} seeds."
    )
    return [table]


@dataclass(frozen=True, slots=True)
class Workload:
    """A text to read in one go: places int [m], where its tokens stand among all that are scored;
    hotness: of its first half."""

    name: str
    subject: Subject
    places: np.ndarray
    hotness: np.ndarray


@dataclass(frozen=True, slots=True)
class Ends:
    """All experts in the best tier, in high and in low, over a workload's tokens."""

    best: Row
    high: Row
    low: Row

    def part(self, places: np.ndarray) -> Ends:
        rows = (self.best, self.high, self.low)
        return Ends(*(replace(row, text=row.text.part(places)) for row in rows))

    def won_back(self, row: Row) -> tuple[Estimate, Estimate]:
        """(mean log-likelihood, KL from the best tier): the share of the way from low to high."""
        rows = (self.low, row, self.high)
        low, mine, high = (each.text.nll for each in rows)
        found = arithmetic.share(low - mine, low - high)
        low, mine, high = (_distance(each) for each in rows)
        return found, arithmetic.share(low - mine, low - high)


def _distance(row: Row) -> np.ndarray:
    if row.text.kl is None:
        raise ValueError("scored without a reference")
    return row.text.kl


def memory(subject: Subject, folder: Path) -> list[Table]:
    """Table 4's form: the best tier, uniform high, uniform low, and DynaExq in several budgets,
    over the mixed text and over each domain alone; the policy adapts while it reads."""
    first, second = halves(subject.windows)
    scored = subject.on(second)
    residency = Residency(scored)
    works = _workloads(scored, residency, first)
    with scored.reference() as reference:
        ends = Ends(
            *(
                scored.score(tier, scored.uniform(tier), against=reference)
                for tier in (scored.tiers[0], scored.high, scored.low)
            )
        )
        tables = []
        with plot.figure(folder, "memory", 2 * len(works), rows=2) as axes:
            for number, work in enumerate(works):
                panels = (axes[number], axes[len(works) + number])
                tables.append(_budgets(residency, work, ends.part(work.places), reference, panels))
    interval = _interval(subject.config)
    tables[-1].notes.append(
        f"Each text is read token by token in one go, the hot sets updated every {interval} steps. "
        f"{STARTED[0].upper()}{STARTED[1:]}: what {subject.on(first).n_tokens} other tokens of "
        f"the same text were routed to, those of the domain where it is one. won back: share of "
        f"the gap from all {subject.low} to all {subject.high}, in mean log-likelihood (log "
        f"perplexity) and in KL from {subject.tiers[0]} (nats); ratio: won back / experts high. "
        f"Swaps take time, so rows that adapt differ a little from run to run."
    )
    return tables


def _workloads(scored: Subject, residency: Residency, first: Sequence[Window]) -> list[Workload]:
    """The mixed text, and each domain where there are several."""
    names = list(dict.fromkeys(window.domain for window in scored.windows))
    domains = np.repeat(
        [names.index(window.domain) for window in scored.windows],
        [window.n_scored for window in scored.windows],
    )
    parts = [[window for window in first if window.domain == name] for name in names]
    found = [residency.hotness(part) for part in parts]
    sizes = [sum(len(window.tokens) for window in part) for part in parts]
    everything = np.average(found, axis=0, weights=sizes)
    works = [Workload(MIXED if names[1:] else "text", scored, np.arange(len(domains)), everything)]
    if names[1:]:
        for index, name in enumerate(names):
            windows = [window for window in scored.windows if window.domain == name]
            places = np.flatnonzero(domains == index)
            works.append(Workload(name or "no domain", scored.on(windows), places, found[index]))
    return works


def _budgets(
    residency: Residency, work: Workload, ends: Ends, reference: Reference, panels: Sequence[Any]
) -> Table:
    subject, whole = work.subject, residency.uniform_bytes(HIGH)
    table = Table(
        f"The same memory, {work.name} (Table 4): {subject.basis}",
        (
            "configuration",
            "memory",
            "experts high",
            "routed to high",
            "perplexity",
            f"change from {subject.high}",
            f"KL from {subject.tiers[0]}",
            "won back",
            "ratio",
            "won back, KL",
            "ratio, KL",
            "promoted",
        ),
    )
    best_bytes = _best_bytes(subject)
    low_bytes = residency.uniform_bytes(LOW)
    add = _adder(table, ends)
    add(subject.tiers[0], best_bytes / whole, None, ends.best)
    add(subject.high, 1.0, 1.0, ends.high)
    add(subject.low, low_bytes / whole, 0.0, ends.low)
    part = Part(reference, work.places)
    starts: tuple[tuple[str, np.ndarray | None, dict[str, Any]], ...] = (
        (EMPTY, None, {}),
        (STARTED, work.hotness, {}),
        (FIXED, work.hotness, {"update_steps": 0}),
        (NULL, residency.random(SEEDS[0]), {"update_steps": 0}),
    )
    counts = sorted({max(1, round(share * residency.n_expert)) for share in HELD})
    for number, (start, hotness, settings) in enumerate(starts):
        found = []
        for n_high in counts:
            label = f"dynaexq, {start}"
            with residency.open(n_high, hotness, **settings) as engine:
                row = subject.score_open(engine, f"{work.name}: {label}", against=part)
                promoted = engine.policy.report()["promotions"]
            held = n_high / residency.n_expert
            add(label, residency.budget_bytes(n_high) / whole, held, row, promoted)
            found.append(ends.won_back(row))
        x = [100 * n_high / residency.n_expert for n_high in counts]
        for axis, estimates in zip(panels, zip(*found, strict=True), strict=True):
            plot.percent_line(axis, x, estimates, start, number, dashed=bool(settings))
    for axis, what in zip(panels, ("log perplexity", f"KL from {subject.tiers[0]}"), strict=True):
        axis.plot([0, 100], [0, 100], color="#666666", linestyle=":", label="as many as are high")
        end = 100 / GOAL
        axis.plot([0, end], [0, 100], color="#222222", linestyle=":", label=f"{GOAL:g} times that")
        axis.set_title(f"{work.name}, {subject.n_tokens} tokens: {what}", fontsize=9)
        axis.set_xlabel(f"experts in {subject.high}, %")
        axis.set_ylabel(f"won back from {subject.low} to {subject.high}, %")
        axis.legend(fontsize=7)
    return table


def _best_bytes(subject: Subject) -> int:
    with ExpertModel.open(subject.config.model) as model:
        return model_shape(model, (0,)).all_slot_bytes()


def _adder(table: Table, ends: Ends) -> Callable[..., None]:
    """What appends a configuration: its label, its bytes as a share of all experts in high, the
    share of experts that are high (None: another tier), its scores, and promotions."""

    def add(
        label: str, share: float, held: float | None, row: Row, promoted: int | None = None
    ) -> None:
        text = row.text
        perplexity, changed = pair(text.perplexity), pair(row.against(ends.high))
        kl = pair(arithmetic.mean(_distance(row)))
        won = [pair(each) for each in ends.won_back(row)] if promoted is not None else []
        ratios = [None if each[0] is None or not held else each[0] / held for each in won]
        routed = _held_high(row) if promoted is not None else held
        cells = [
            cell
            for each, ratio in zip(won, ratios, strict=True)
            for cell in (percent(each), "?" if ratio is None else f"{ratio:.2f}")
        ]
        table.rows.append(
            (
                label,
                f"{100 * share:.1f} %",
                "" if held is None else f"{100 * held:.0f} %",
                "" if routed is None else f"{100 * routed:.1f} %",
                with_error(perplexity),
                change(changed),
                with_error(kl, 4),
                *(cells or [""] * 4),
                "" if promoted is None else str(promoted),
            )
        )
        table.data.append(
            {
                "configuration": label,
                "memory": share,
                "high": held,
                "routed_high": routed,
                "perplexity": perplexity,
                "change": changed,
                "kl": kl,
                "won_back": won[0] if won else None,
                "won_back_kl": won[1] if won else None,
                "ratio": ratios[0] if ratios else None,
                "ratio_kl": ratios[1] if ratios else None,
                "promoted": promoted,
            }
        )

    return add
