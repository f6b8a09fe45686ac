"""The studies by name, each as tables and a plot; here those of DyMoE's tables and figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.config import Config
from orchestrator.engine import Engine
from orchestrator.errors import ConfigError
from orchestrator.eval import arithmetic, plot
from orchestrator.eval.arithmetic import Estimate
from orchestrator.eval.policies import OneLayer, RandomCritical
from orchestrator.eval.report import Table, change, percent, with_error
from orchestrator.eval.run import EvalOptions, Report, pair
from orchestrator.eval.similarity import similarity
from orchestrator.eval.studies_dynaexq import demotion, memory
from orchestrator.eval.subject import SKIP, Row, Subject
from orchestrator.files import write_whole
from orchestrator.plotting import COLOURS
from orchestrator.policy.retention import SCHEDULES

SEEDS = (1, 2, 3)
SWEEP = (0.6, 0.7, 0.75, 0.8, 0.9, 1.0)
RATIOS = (0.6, 0.75, 0.9)
SHARES = (0.05, 0.1, 0.2, 0.4, 0.7, 1.0)

_COLUMNS = ("configuration", "r", "realised", "low or skipped", "perplexity")


def run_study(
    name: str, config: Config, options: EvalOptions, folder: Path | None, report: Report
) -> list[Table]:
    """Runs one study and writes NAME.md, NAME.json, NAME.png and NAME.svg to folder.

    Raises ConfigError for an unknown study, without a folder or without matplotlib.
    """
    study = STUDIES.get(name)
    if study is None:
        raise ConfigError(f"unknown study '{name}'; known: {', '.join(STUDIES)}")
    if folder is None:
        raise ConfigError("a study writes tables and plots: give --out DIR")
    plot.require()
    subject = Subject(config, options, report)
    folder.mkdir(parents=True, exist_ok=True)
    tables = study(subject, folder)
    text = "\n\n".join(table.markdown() for table in tables)
    write_whole(folder / f"{name}.md", text + "\n", 0o644)
    data = {"study": name, "model": subject.name, "tokens": subject.n_tokens}
    rows = [{"title": table.title, "rows": table.data} for table in tables]
    written = json.dumps({**data, "tables": rows}, indent=1) + "\n"
    write_whole(folder / f"{name}.json", written, 0o644)
    return tables


def _add(
    table: Table, label: str, retention: float | None, row: Row, **more: tuple[str, Any]
) -> None:
    """Appends a configuration; more: (text, number) of the columns behind the common ones."""
    usage = row.usage
    lower = (usage.low or 0.0) + (usage.skip or 0.0) if usage else 0.0
    cells = (
        label,
        "" if retention is None else f"{retention:g}",
        "" if retention is None or row.realised is None else f"{row.realised:.3f}",
        f"{100 * lower:.1f} %",
        with_error(pair(row.text.perplexity)),
    )
    table.rows.append((*cells, *(text for text, _ in more.values())))
    table.data.append(
        {
            "configuration": label,
            "retention": retention,
            "realised": row.realised,
            "usage": usage.as_dict() if usage else None,
            "perplexity": pair(row.text.perplexity),
            "domains": {name: pair(each) for name, each in row.text.by_domain().items()},
            **{name: number for name, (_, number) in more.items()},
        }
    )


def _change(row: Row, base: Row) -> tuple[str, Any]:
    found = pair(row.against(base))
    return change(found), found


def _distance(row: Row, what: str) -> tuple[str, Any]:
    """kl or top1 against the reference that the row was scored with."""
    values = getattr(row.text, {"kl": "kl", "top1": "agrees"}[what])
    found = pair(arithmetic.mean(values.astype(float)))
    return (percent(found) if what == "top1" else with_error(found, 4)), found


def _answers(row: Row) -> dict[str, tuple[str, Any]]:
    if row.choices is None:
        return {}
    acc, norm = pair(row.choices.acc), pair(row.choices.acc_norm)
    return {"acc": (percent(acc), acc), "acc_norm": (percent(norm), norm)}


def accuracy(subject: Subject, folder: Path) -> list[Table]:
    """Tables 1 and 2: each tier alone, then high/skip and high/low at three ratios."""
    asked = ("acc", "acc_norm") if subject.questions else ()
    columns = (*_COLUMNS, f"change from {subject.high}", "KL", "same top token", *asked)
    uniform = Table(f"Uniform precision (Table 1): {subject.basis}", columns)
    mixed = Table(f"High / low and skip (Table 2): {subject.basis}", columns)
    with subject.reference() as reference:

        def score(label: str, settings: dict[str, Any]) -> Row:
            return subject.score(label, settings, against=reference, ask=True)

        rows = {tier: score(tier, subject.uniform(tier)) for tier in subject.tiers}
        base = rows[subject.high]
        for tier in reversed(subject.tiers):
            _add(uniform, tier, None, rows[tier], **_figures(rows[tier], base))
        for low in (SKIP, subject.low):
            for retention in (0.75, 0.9, 1.0):
                label = f"{subject.high} / {low}"
                row = score(label, subject.mixed(low, retention))
                _add(mixed, label, retention, row, **_figures(row, base))
    note = (
        f"KL (nats) and same top token: against {subject.tiers[0]}. Every token is decided on its "
        f"own, every expert computed in the tier that was decided."
    )
    mixed.notes.append(note)
    with plot.figure(folder, "accuracy") as (axis,):
        data = [*uniform.data, *mixed.data]
        labels = [
            row["configuration"] + (f"\nr = {row['retention']:g}" if row["retention"] else "")
            for row in data
        ]
        places = range(len(data))
        axis.bar(
            places,
            [100 * row["change"][0] for row in data],
            yerr=[100 * row["change"][1] for row in data],
            capsize=3,
            color=[COLOURS[0]] * len(uniform.data) + [COLOURS[1]] * len(mixed.data),
        )
        axis.set_xticks(places, labels, rotation=60, ha="right", fontsize=8)
        axis.set_ylabel(f"perplexity against {subject.high}, %")
        axis.set_title(subject.basis, fontsize=9)
    return [uniform, mixed]


def _figures(row: Row, base: Row) -> dict[str, tuple[str, Any]]:
    return {
        "change": _change(row, base),
        "kl": _distance(row, "kl"),
        "top1": _distance(row, "top1"),
        **_answers(row),
    }


def retention(subject: Subject, folder: Path) -> list[Table]:
    """Figure 11: quality over the retention ratio."""
    asked = ("acc", "acc_norm") if subject.questions else ()
    table = Table(
        f"Quality over the retention ratio (Figure 11): {subject.basis}",
        (*_COLUMNS, f"change from {subject.high}", *asked),
    )
    base = subject.score(subject.high, subject.uniform(subject.high), ask=True)
    least = subject.score(subject.low, subject.uniform(subject.low), ask=True)
    for tier, row in ((subject.high, base), (subject.low, least)):
        _add(table, tier, None, row, change=_change(row, base), **_answers(row))
    found: dict[str, list[Row]] = {}
    for low in (SKIP, subject.low):
        label = f"{subject.high} / {low}"
        for ratio in SWEEP:
            row = subject.score(label, subject.mixed(low, ratio), ask=True)
            found.setdefault(label, []).append(row)
            _add(table, label, ratio, row, change=_change(row, base), **_answers(row))
    with plot.figure(folder, "retention", 2 if asked else 1) as axes:
        for number, (label, rows) in enumerate(found.items()):
            x = [row.realised or 0.0 for row in rows]
            changes = [row.against(base) for row in rows]
            plot.percent_line(axes[0], x, changes, label, number)
            if asked:
                plot.percent_line(axes[1], x, [_acc(row) for row in rows], label, number)
        plot.level(axes[0], 0.0, f"all {subject.high}")
        plot.level(axes[0], 100 * least.against(base).value, f"all {subject.low}")
        axes[0].set_ylabel(f"perplexity against {subject.high}, %")
        if asked:
            plot.level(axes[1], 100 * _acc(base).value, f"all {subject.high}")
            plot.level(axes[1], 100 * _acc(least).value, f"all {subject.low}")
            axes[1].set_ylabel("multiple choice, acc, %")
        for axis in axes:
            axis.set_xlabel("realised share of critical experts")
            axis.legend()
        axes[0].set_title(subject.basis, fontsize=9)
    return [table]


def _acc(row: Row) -> Estimate:
    return row.choices.acc if row.choices is not None else Estimate(0.0, 0.0)


def critical(subject: Subject, folder: Path) -> list[Table]:
    """Figure 3: which experts are critical, chosen by importance or at random, with the
    cosine schedule and with the same ratio in every layer; for decode steps and for prompts."""
    tables = []
    panels = [(low, prefill) for prefill in (False, True) for low in (SKIP, subject.low)]
    with plot.figure(folder, "critical", len(panels), rows=2) as axes:
        for axis, (low, prefill) in zip(axes, panels, strict=True):
            tables.append(_critical(subject, low, prefill, axis))
    return tables


def _critical(subject: Subject, low: str, prefill: bool, axis: Any) -> Table:
    form = "prompts" if prefill else "decode steps"
    base = subject.score(subject.high, subject.uniform(subject.high), prefill=prefill)
    table = Table(
        f"Critical experts of {form}, {subject.high} / {low} (Figure 3): {subject.basis}",
        (*_COLUMNS, f"change from {subject.high}"),
    )
    # (label, setting of `importance`, at random?)
    kinds = [("gate score", "window", False), ("random", "load", True)]
    if prefill:
        kinds = [
            ("heavy hitters", "window", False),
            ("heavy hitters, exact", "exact", False),
            ("total load", "load", False),
            ("random", "load", True),
        ]
    for number, (kind, importance, at_random) in enumerate(kinds):
        for schedule, name in (("cosine", "depth-based"), ("flat", "equal")):
            label, rows = f"{kind}, {name}", []
            for ratio in RATIOS:
                settings = subject.mixed(low, ratio, schedule=schedule, importance=importance)
                if at_random:
                    row = _mean_of_random(subject, label, settings, prefill)
                else:
                    row = subject.score(label, settings, prefill=prefill)
                rows.append(row)
                _add(table, label, ratio, row, change=_change(row, base))
            x = [row.usage.high or 0.0 if row.usage else 0.0 for row in rows]
            changes = [row.against(base) for row in rows]
            plot.percent_line(axis, x, changes, label, number, dashed=schedule == "flat")
    axis.axhline(0.0, color="#666666", linestyle=":", linewidth=1.2)
    axis.set_title(f"{form}, {subject.high} / {low}", fontsize=9)
    axis.set_xlabel("share of routed experts in high")
    axis.set_ylabel(f"perplexity against {subject.high}, %")
    if low == SKIP:
        axis.set_yscale("symlog", linthresh=10)
        axis.set_ylim(bottom=-3)
    axis.legend(fontsize=7, loc="upper right")
    if any(at_random for _, _, at_random in kinds):
        table.notes.append(f"random: mean log-likelihood of {len(SEEDS)} seeds.")
    return table


def _mean_of_random(subject: Subject, label: str, settings: dict[str, Any], prefill: bool) -> Row:
    """Random choices of several seeds, each token's log-likelihood averaged over them."""
    with Engine.open(subject.config.with_changes(**settings)) as engine:
        rows = [
            subject.score_open(engine, label, partial(RandomCritical, seed=seed), prefill)
            for seed in SEEDS
        ]
    return rows[0].averaged(rows[1:])


def tokens(subject: Subject, folder: Path) -> list[Table]:
    """Section 4.2.1: the share of a prompt's tokens that count as heavy hitters."""
    table = Table(
        f"Heavy hitters of prompts, {subject.high} / {SKIP}: {subject.basis}",
        ("heavy", *_COLUMNS[1:], f"change from {subject.high}"),
    )
    base = subject.score(subject.high, subject.uniform(subject.high), prefill=True)
    with plot.figure(folder, "tokens") as (axis,):
        for number, ratio in enumerate(RATIOS):
            changes = []
            for share in SHARES:
                settings = subject.mixed(SKIP, ratio, heavy_hitters=share)
                row = subject.score(f"{share:.0%} heavy", settings, prefill=True)
                changes.append(row.against(base))
                _add(table, f"{share:.0%}", ratio, row, change=_change(row, base))
            plot.percent_line(
                axis, [100 * share for share in SHARES], changes, f"r = {ratio:g}", number
            )
        axis.set_xlabel("tokens that are heavy hitters, % (100: total load)")
        axis.set_ylabel(f"perplexity against {subject.high}, %")
        axis.set_title(subject.basis, fontsize=9)
        axis.legend()
    return [table]


def schedule(subject: Subject, folder: Path) -> list[Table]:
    """Section 4.3: how the critical experts are spread over the depth, at the same mean."""
    table = Table(
        f"Depth schedules at the same mean ratio (4.3): {subject.basis}",
        (*_COLUMNS, f"change from {subject.high}", "critical by layer"),
    )
    base = subject.score(subject.high, subject.uniform(subject.high))
    with plot.figure(folder, "schedule", 2) as axes:
        for axis, low in zip(axes, (SKIP, subject.low), strict=True):
            for number, name in enumerate(SCHEDULES):
                rows = []
                for ratio in RATIOS:
                    settings = subject.mixed(low, ratio, schedule=name)
                    label = f"{subject.high} / {low}, {name}"
                    with Engine.open(subject.config.with_changes(**settings)) as engine:
                        row = subject.score_open(engine, label)
                        counts = list(getattr(engine.policy, "critical", ()))
                    rows.append(row)
                    shown = " ".join(str(each) for each in counts)
                    _add(
                        table,
                        label,
                        ratio,
                        row,
                        change=_change(row, base),
                        critical=(shown, counts),
                    )
                x = [row.realised or 0.0 for row in rows]
                plot.percent_line(axis, x, [row.against(base) for row in rows], name, number)
            plot.level(axis, 0.0, f"all {subject.high}")
            axis.set_title(f"{subject.high} / {low}", fontsize=9)
            axis.set_xlabel("realised share of critical experts")
            axis.set_ylabel(f"perplexity against {subject.high}, %")
            axis.legend()
    return [table]


def depth(subject: Subject, folder: Path) -> list[Table]:
    """Figure 5: one layer at a time in the low tier, all others in the best one."""
    best = subject.tiers[0]
    table = Table(
        f"One layer in {subject.low}, all others in {best} (Figure 5): {subject.basis}",
        ("layer", *_COLUMNS[4:], f"change from {best}"),
    )
    base = subject.score(best, subject.uniform(best))
    changes = []
    settings = subject.mixed(subject.low, 0.5, high_tier=best)
    with Engine.open(subject.config.with_changes(**settings)) as engine:
        for layer, il in enumerate(subject.layer_ids):
            row = subject.score_open(engine, f"layer {il}", partial(OneLayer, layer=layer, tier=1))
            change = row.against(base)
            changes.append(change)
            shown = _change(row, base)
            table.rows.append((str(il), with_error(pair(row.text.perplexity)), shown[0]))
            table.data.append(
                {"layer": il, "perplexity": pair(row.text.perplexity), "change": shown[1]}
            )
    with plot.figure(folder, "depth") as (axis,):
        axis.bar(
            subject.layer_ids,
            [100 * each.value for each in changes],
            yerr=[100 * each.error for each in changes],
            color=COLOURS[0],
            capsize=3,
        )
        axis.set_xticks(subject.layer_ids)
        axis.set_xlabel(f"the layer in {subject.low}")
        axis.set_ylabel(f"perplexity against all {best}, %")
        axis.set_title(subject.basis, fontsize=9)
    return [table]


STUDIES: dict[str, Callable[[Subject, Path], list[Table]]] = {
    "accuracy": accuracy,
    "retention": retention,
    "critical": critical,
    "tokens": tokens,
    "schedule": schedule,
    "depth": depth,
    "similarity": similarity,
    "demotion": demotion,
    "memory": memory,
}
