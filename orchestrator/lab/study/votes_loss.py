"""Figure 6 of FIRM-MoE: the loss (eq. 11) over candidates K and layers P, and what tuning finds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator.errors import ConfigError
from orchestrator.lab.replay import ReplayOptions, Trace
from orchestrator.lab.replay.report import set_up_for, speed_and_time
from orchestrator.lab.replay.simulate import simulate
from orchestrator.lab.study.plot import Line, Panel, exact
from orchestrator.lab.study.study import Drawn, Findings
from orchestrator.lab.table import Column, Row, Table, fixed
from orchestrator.native import Library
from orchestrator.policy.firm import ALL, CLIMB, FIRM, GROUPS, MOL, Tuner, Votes, depth_of

_NEVER = 2**24
_BASIS = (
    "Off-policy: one run is played, which loads by the best pair so far, and every pair is counted "
    "against what that run has in memory. In-sample: a pair is judged on the tokens that chose it."
)

# Of a group, by P - 1 and K - 1.
Grid = list[list[float]]


class Played(NamedTuple):
    """What the study is measured on."""

    library: Library
    trace: Trace
    options: ReplayOptions


class VotesLoss(Drawn[Played]):
    """Plays a trace with FIRM: once to count every (K, P) on every token, and once for each way
    to tune, whose choice is then looked up there."""

    name = "votes-loss"

    def publish(
        self, library: Library, trace: Trace, options: ReplayOptions, folder: Path | None
    ) -> list[Table]:
        """Measures, and writes the table, its figures and the picture to the folder. Raises
        ConfigError where the trace does not do."""
        folder = self.check(folder)
        found = self.measure(Played(library, trace, options))
        return self.write_found(found, folder, model=trace.header.model)

    def measure(self, on: Played) -> Findings:
        depth = int(on.trace.arrays["event_ahead"].max(initial=0))
        if depth == 0:
            raise ConfigError(
                f"--study {self.name}: the trace does not look ahead, record it with --policy "
                f"{FIRM.name} --agree {MOL} --n-ahead 4"
            )
        if on.options.policy not in (None, FIRM.name):
            raise ConfigError(
                f"--study {self.name} plays --policy {FIRM.name}: leave the other out"
            )
        way = on.options.settings.get("agree", MOL)
        usual = {"n_ahead": depth_of(way, depth), "prefetch": "on", "agree": way}
        asked = {**usual, **on.options.settings}
        counted, held = _play(on, {**asked, "tune": ALL, "tune_tokens": _NEVER}, every=1)
        there = set(counted.groups[1:])
        losses: dict[str, Grid] = {
            name: counted.grids[group].means()
            for group, name in enumerate(GROUPS)
            if group in there
        }
        if not any(loss for rows in losses.values() for row in rows for loss in row):
            raise ConfigError(
                f"--study {self.name}: everything was in memory: give a smaller --expert-ram"
            )
        tuned = {way: _play(on, {**asked, "tune": way})[0] for way in (ALL, CLIMB)}
        tokens = min(min(each.tokens, each.until) for each in tuned.values())
        title = (
            f"Loss of eq. 11 a layer and token over K, P (Figure 6 of FIRM-MoE): "
            f"{on.trace.header.model}, slots for {100 * held:.0f} % of the experts; tuned in "
            f"{tokens} tokens"
        )
        rows, panels = [], []
        for group, grid in losses.items():
            chosen = {way: each.by_group()[group] for way, each in tuned.items()}
            rows.append(_row(group, grid, chosen))
            panels.append(_panel(group, grid, chosen))
        return Findings([Table(title, _columns(len(grid)), rows, [_BASIS])], panels)


def _play(on: Played, settings: Mapping[str, Any], every: int | None = None) -> tuple[Tuner, float]:
    """The tuner at the end of the trace, and the share of the experts that had slots."""
    speed, time = speed_and_time(on.trace.header, on.options)
    options = replace(on.options, policy=FIRM.name, settings=settings)
    made = set_up_for(on.trace, options, FIRM, speed)
    policy = made.policy
    assert isinstance(policy, FIRM)
    if every is not None:
        policy.tuner.every = every
    simulate(on.library, on.trace, made, speed, time)
    return policy.tuner, made.slots.total_bytes / made.shape.all_slot_bytes()


def _least(grid: Grid) -> tuple[float, Votes]:
    """The least loss of a group, and its (K, P)."""
    return min((loss, (k, p)) for p, row in enumerate(grid, 1) for k, loss in enumerate(row, 1))


def _at(grid: Grid, votes: Votes) -> float:
    return grid[votes[1] - 1][votes[0] - 1]


def _row(group: str, grid: Grid, chosen: Mapping[str, Votes]) -> Row:
    least, best = _least(grid)
    row: Row = {"group": group, "losses": grid, "best": best, "least": least, **chosen}
    for way, votes in chosen.items():
        row[f"{way}_ratio"] = _at(grid, votes) / least if least else None
    return row | {f"P={p}": min(each) for p, each in enumerate(grid, 1)}


def _columns(depth: int) -> list[Column]:
    def pair(votes: Votes) -> str:
        return f"{votes[0]}, {votes[1]}"

    found = [
        Column("layers", "group", left=True),
        Column("best K, P", "best", pair),
        Column("its loss", "least", fixed(3)),
    ]
    for way in (ALL, CLIMB):
        found.append(Column(f"{way}: K, P", way, pair))
        found.append(Column("x best", f"{way}_ratio", fixed(3)))
    return found + [Column(f"best at P={p}", f"P={p}", fixed(3)) for p in range(1, depth + 1)]


def _panel(group: str, grid: Grid, chosen: Mapping[str, Votes]) -> Panel:
    """The loss over K, a line for each P, with what is the least and what tuning finds."""
    drawn = [Line(f"P = {p}", range(1, len(row) + 1), exact(row)) for p, row in enumerate(grid, 1)]
    marks = {"least": _least(grid)[1], **chosen}
    drawn += [
        Line(f"{name}: K, P = {k}, {p}", [k], exact([_at(grid, (k, p))]))
        for name, (k, p) in marks.items()
    ]
    return Panel("candidates K", "loss a layer and token", drawn, f"{group} layers")
