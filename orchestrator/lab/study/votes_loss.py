"""Figure 6 of FIRM-MoE: the loss (eq. 11) over candidates K and layers P, and what tuning finds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator.errors import ConfigError
from orchestrator.lab.experiment import Experiment
from orchestrator.lab.replay import ReplayOptions, Trace
from orchestrator.lab.replay.report import set_up_for, speed_and_time
from orchestrator.lab.replay.simulate import simulate
from orchestrator.lab.study import plot
from orchestrator.lab.table import Column, Row, Table, fixed
from orchestrator.native import Library
from orchestrator.policy.firm import ALL, CLIMB, FIRM, GROUPS, MOL, Tuner, Votes, depth_of

_NEVER = 2**24

BASIS = (
    "Off-policy: one run is played, which loads by the best pair so far, and every pair is counted "
    "against what that run has in memory. In-sample: a pair is judged on the tokens that chose it."
)
_SHORT = "off-policy: all pairs counted on one run; in-sample: on the tokens that chose them"


class Played(NamedTuple):
    """What the study is measured on."""

    library: Library
    trace: Trace
    options: ReplayOptions


@dataclass(slots=True)
class Surface:
    """losses[group][P - 1][K - 1], of the groups that have layers; tuned[way][group]: the (K, P)
    that was found within `tokens` decode steps; share: of the experts in slots."""

    model: str
    tokens: int
    share: float
    losses: dict[str, list[list[float]]]
    tuned: dict[str, dict[str, Votes]]

    def least(self, group: str) -> tuple[float, Votes]:
        """The least loss of a group, and its (K, P)."""
        rows = self.losses[group]
        return min((loss, (k, p)) for p, row in enumerate(rows, 1) for k, loss in enumerate(row, 1))

    def at(self, group: str, votes: Votes) -> float:
        """The loss of a group at one (K, P)."""
        return self.losses[group][votes[1] - 1][votes[0] - 1]


class VotesLoss(Experiment[Played, Surface]):
    """Plays a trace with FIRM: once to count every (K, P) on every token, and once for each way
    to tune, whose choice is then looked up there."""

    name = "votes-loss"
    draws = True

    def measure(self, on: Played) -> Surface:
        """Raises ConfigError where the trace does not do."""
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
        counted, share = self._play(on, {**asked, "tune": ALL, "tune_tokens": _NEVER}, every=1)
        used = {GROUPS[group]: counted.grids[group].means() for group in set(counted.groups[1:])}
        if not any(loss for rows in used.values() for row in rows for loss in row):
            raise ConfigError(
                f"--study {self.name}: everything was in memory: give a smaller --expert-ram"
            )
        tuned, tokens = {}, 0
        for way in (ALL, CLIMB):
            found, _ = self._play(on, {**asked, "tune": way})
            tuned[way], tokens = found.by_group(), min(found.tokens, found.until)
        losses = {group: used[group] for group in GROUPS if group in used}
        return Surface(on.trace.header.model, tokens, share, losses, tuned)

    @staticmethod
    def _play(
        on: Played, settings: Mapping[str, Any], every: int | None = None
    ) -> tuple[Tuner, float]:
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

    def tables(self, found: Surface) -> list[Table]:
        rows: list[Row] = []
        for group, losses in found.losses.items():
            least, best = found.least(group)
            row: Row = {"group": group, "best": best, "least": least}
            for way, chosen in found.tuned.items():
                loss = found.at(group, chosen[group])
                row |= {way: chosen[group], f"{way}_ratio": loss / least if least else None}
            rows.append(row | {f"P={p}": min(each) for p, each in enumerate(losses, 1)})
        depth = len(next(iter(found.losses.values())))
        title = (
            f"Loss of eq. 11 a layer and token over K, P (Figure 6 of FIRM-MoE): {found.model}, "
            f"slots for {100 * found.share:.0f} % of the experts; tuned in {found.tokens} tokens"
        )
        return [
            Table(
                title,
                (
                    Column("layers", "group", left=True),
                    Column("best K, P", "best", _pair),
                    Column("its loss", "least", fixed(3)),
                    *(
                        column
                        for way in found.tuned
                        for column in (
                            Column(f"{way}: K, P", way, _pair),
                            Column("x best", f"{way}_ratio", fixed(3)),
                        )
                    ),
                    *(Column(f"best at P={p}", f"P={p}", fixed(3)) for p in range(1, depth + 1)),
                ),
                rows,
                [BASIS],
            )
        ]

    def draw(self, found: Surface, folder: Path) -> list[Path]:
        with plot.figure(folder, self.name, len(found.losses)) as axes:
            for axis, (group, rows) in zip(axes, found.losses.items(), strict=True):
                extent = (0.5, len(rows[0]) + 0.5, 0.5, len(rows) + 0.5)
                image = axis.imshow(
                    rows, origin="lower", aspect="auto", extent=extent, cmap="Blues_r"
                )
                axis.figure.colorbar(image, ax=axis)
                _, best = found.least(group)
                axis.plot(*best, "*", color="#d62728", markersize=16, label="least")
                axis.plot(
                    *found.tuned[ALL][group],
                    "o",
                    color="#ff7f0e",
                    label=ALL,
                    fillstyle="none",
                    markersize=15,
                    markeredgewidth=2,
                )
                axis.plot(
                    *found.tuned[CLIMB][group],
                    "x",
                    color="#2ca02c",
                    label=CLIMB,
                    markersize=10,
                    markeredgewidth=2,
                )
                middle = sum(image.get_clim()) / 2
                for p, row in enumerate(rows, 1):
                    for k, loss in enumerate(row, 1):
                        colour = "white" if loss < middle else "black"
                        place = (k, p - 0.35)
                        axis.annotate(f"{loss:.2f}", place, ha="center", fontsize=7, color=colour)
                axis.set_xticks(range(1, len(rows[0]) + 1))
                axis.set_yticks(range(1, len(rows) + 1))
                axis.set_xlabel("candidates K")
                axis.set_ylabel("layers P")
                axis.set_title(f"{group} layers")
                axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncol=3, fontsize=8)
            axes[0].figure.suptitle(f"{found.model}; {_SHORT}", fontsize=9)
        return plot.files(folder, self.name)

    def publish(
        self, library: Library, trace: Trace, options: ReplayOptions, folder: Path | None
    ) -> list[Table]:
        """Measures, and writes the table, its figures and the picture to the folder. Raises
        ConfigError without a folder, before anything is measured."""
        if folder is None:
            raise ConfigError("a study writes tables and plots: give --out DIR")
        plot.require()
        found = self.measure(Played(library, trace, options))
        tables = self.tables(found)
        data = {"study": self.name, "model": found.model, "losses": found.losses}
        rows = [list(table.rows) for table in tables]
        self.write(folder, self.name, found, tables, {**data, "tuned": found.tuned, "rows": rows})
        return tables


def _pair(votes: Votes) -> str:
    return f"{votes[0]}, {votes[1]}"
