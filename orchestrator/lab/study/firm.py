"""Measurements of FIRM-MoE on a recorded run, in virtual time.

- `compared_variants` measures the gain of each part (Table 1, Figure 4).
- `Played.answer` measures the time of an answer (Figure 5).
- `measure_votes` measures the loss of eq. 11 over candidates K and layers P, and the choice of each
  tuning method (Figure 6). K is at most k, the number of candidates that the look-ahead records.
  `heop` goes beyond.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from orchestrator.errors import BudgetError, ConfigError
from orchestrator.events import Phase
from orchestrator.lab.plotting import Line, Panel, exact
from orchestrator.lab.replay import ReplayOptions, Trace
from orchestrator.lab.replay.report import RIGID, WHOLE, set_up_for, speed_and_time
from orchestrator.lab.replay.simulate import Outcome, Setup, simulate
from orchestrator.lab.study.study import Findings, lines, share
from orchestrator.lab.table import Column, Row, Table, fixed
from orchestrator.native import Library
from orchestrator.policy import policy_class
from orchestrator.policy.firm import ALL, CLIMB, FIRM, GROUPS, MOL, RANK, Tuner, Votes, depth_of

NO_PREFETCH, BASE = "no prefetch", "baseline BB: top-k, whole experts"
WORLDS = {
    NO_PREFETCH: "demand reads come first",
    BASE: "all reads wait in one queue, as in the paper",
}
# Decode steps that are ignored while the slots fill.
WARM_UP = 16

_NEVER = 2**24
_BASIS = (
    "K, P: the experts of a layer are predicted by the P layers before the layer. Each of these P "
    "layers predicts K experts.",
    "Prediction loss of a layer: counts wrong and missing predictions of experts that are not in "
    "memory.",
    'Column "best K, P": the pair with the smallest loss. Column "all: K, P": the pair that --tune '
    'all chooses. Column "climb: K, P": the pair that --tune climb chooses.',
    'Column "x best": the loss of the pair K, P in the column to its left, divided by the smallest '
    "loss of all pairs.",
    "Losses are estimates (off-policy): the replay computes the loss of each pair of K (predicted "
    "experts per layer) and P (earlier layers that predict), but prefetches with one pair at a "
    "time. With another pair, other experts would be in memory.",
    "Losses are in-sample: K (predicted experts per layer) and P (earlier layers that predict "
    "them) are chosen and compared on the same tokens.",
)

# Losses of a group, indexed by [P - 1][K - 1].
Grid = list[list[float]]


class Variant(NamedTuple):
    """A policy with its settings, whose simulated speed is compared with that of other policies.

    The speed comes from a replay of a recorded run.

    - name: the name in tables and plots.
    - settings: the policy's own settings.
    - changes: options of the replay, such as the order of disk reads, that are set only for this
      variant.
    """

    name: str
    policy: str
    settings: dict[str, Any]
    changes: Mapping[str, Any] = MappingProxyType({})


class Played(NamedTuple):
    """A recorded trace and the options with which it is replayed.

    The trace also contains the recorded run's predictions of which experts later layers use.
    """

    library: Library
    trace: Trace
    options: ReplayOptions

    def play(
        self,
        policy: str,
        settings: Mapping[str, Any],
        every: int | None = None,
        **changes: Any,
    ) -> tuple[Setup, Outcome]:
        """Replay the recorded run with a policy, in a simulation without the model.

        Returns the policy with its expert slots, and the outcome: counters and the time of each
        step.

        - policy, settings: name of the policy, and its settings.
        - every: how often the policy "firm" checks its predictions of experts; 4 means at every
          fourth token. None keeps the default. Other policies ignore it.
        - changes: replay options that replace those of this object.
        """
        asked = replace(self.options, policy=policy, settings=settings, **changes)
        speed, time = speed_and_time(self.trace.header, asked)
        made = set_up_for(self.trace, asked, policy_class(policy), speed)
        if every and isinstance(made.policy, FIRM):
            made.policy.tuner.every = every
        return made, simulate(self.library, self.trace, made, speed, time)

    def answer(self, variant: Variant, expert_bytes: int) -> np.ndarray:
        """Replay the recorded run with a variant, and return when each answer token is ready.

        The times are float64 [n], in milliseconds from the start of the prompt.

        - variant: a policy with its settings and replay options.
        - expert_bytes: the memory for experts.
        """
        _, outcome = self.play(
            variant.policy, variant.settings, expert_ram=expert_bytes, **variant.changes
        )
        decoded = self.trace.arrays["step_phase"] == Phase.DECODE
        found: np.ndarray = np.cumsum(outcome.step_us)[decoded] / 1000
        return found


def parts(k: int) -> dict[str, list[Variant]]:
    """Return groups of policies to compare, which show the gain from each part of FIRM-MoE.

    The result maps the name of a group's baseline to the group's policies, including the baseline:

    - NO_PREFETCH: the baseline is FIRM-MoE without prefetching. It is compared with several ways of
      prefetching, with a variant that waits for whole experts, and with `lru` and `dymoe`.
    - BASE: the baseline is the one in the FIRM-MoE paper, which prefetches whole experts. It is
      compared with variants that add parts of FIRM-MoE.

    `k` is the number of experts per token.
    """
    off, whole, rigid = {"prefetch": "off"}, {"wait": WHOLE}, {"link": RIGID}
    dymoe = {"prefetch": "on", "retention": 1.0}
    one, few = {"votes": f"{k},1"}, {"votes": f"{min(3, k)},3"}

    def ahead(way: str, n: int) -> dict[str, Any]:
        return {"prefetch": "on", "agree": way, "prefetch_kinds": n}

    ways = ((RANK, 1), (RANK, 2), (RANK, 3), (MOL, 1))
    return {
        NO_PREFETCH: [
            Variant("lru", "lru", {}),
            Variant("waits for whole experts", FIRM.name, off, whole),
            Variant(NO_PREFETCH, FIRM.name, off),
            Variant("dymoe, r=1", "dymoe", dymoe),
            *(Variant(f"firm, {way}, n={n}", FIRM.name, ahead(way, n)) for way, n in ways),
        ],
        BASE: [
            Variant(BASE, FIRM.name, ahead(RANK, 3) | one, rigid | whole),
            Variant("+ FG: gates alone", FIRM.name, ahead(RANK, 1) | one, rigid),
            Variant("+ MoL", FIRM.name, ahead(MOL, 3) | few, rigid | whole),
            Variant("+ FG + MoL", FIRM.name, ahead(MOL, 1) | few, rigid),
            Variant("all: tuned", FIRM.name, ahead(MOL, 1), rigid),
        ],
    }


def expert_bytes(trace: Trace, precision: str | None = None) -> int:
    """Return the size of all experts of a recorded model in one precision, in bytes.

    `precision` is its name, such as "q4_k". None is the high precision of the recorded run.
    """
    tier = trace.tier_index(precision or trace.header.in_use[0])
    return trace.n_expert * sum(
        each.expert_bytes
        for layer in trace.slices
        for kind in layer
        if (each := kind[tier]) is not None
    )


def on_link(trace: Trace, reads: float, tier: str | None = None) -> ReplayOptions:
    """Return replay options for a simulated disk whose speed is relative to the computing speed.

    `reads` is the time to read all experts of one token, divided by the time in which the recorded
    run computed a token. With 2, reading takes twice as long as computing.

    `tier` is the precision of the experts, such as "q4_k". None is the high precision of the
    recorded run.
    """
    # The ratio of two replayed speeds then does not depend on the load of the machine.
    decoded = trace.arrays["step_phase"] == Phase.DECODE
    compute_s = float(np.median(trace.compute_ms[decoded])) / 1000
    token_bytes = expert_bytes(trace, tier) * trace.n_expert_used / trace.n_expert
    return ReplayOptions(bandwidth=int(token_bytes / (reads * compute_s)), latency_us=0)


def compared_variants(on: Played, base: str, shares: Sequence[float]) -> tuple[Table, Panel]:
    """Replay a recorded run with several policies, and compare their simulated speeds.

    The policies are FIRM-MoE with and without its parts, and others (see `parts`). Returns a table
    and a plot of speeds relative to the baseline `base`.

    - on: the recorded run and its replay options.
    - base: NO_PREFETCH, a policy that reads missing experts on demand, or BASE, the baseline of the
      paper, which prefetches whole experts.
    - shares: memory for experts, as fractions of the size of all experts. Too small values are left
      out.

    Raises ConfigError if all values are too small.
    """
    # Slots are divided evenly among the layers. The paper has one LRU cache for all layers.
    every, order, rows = expert_bytes(on.trace), WORLDS[base], []
    left_out = []
    for held in shares:
        try:
            same = [
                _measured(on, each, int(held * every)) | {"held": held}
                for each in parts(on.trace.n_expert_used)[base]
            ]
        except BudgetError:
            left_out.append(f"{held:.0%}")
            continue
        (other,) = (row for row in same if row["name"] == base)
        for row in same:
            row["speedup"] = other["tpot_ms_mean"] / row["tpot_ms_mean"]
            if other["bytes_per_token"]:
                row["bytes_ratio"] = row["bytes_per_token"] / other["bytes_per_token"]
        rows += same
    if not rows:
        raise ConfigError(
            f"the caches are too small: slots for {' or '.join(left_out)} of the experts cannot "
            f"hold the experts of one token. Measure larger caches"
        )
    title = (
        f"Speed of several ways to prefetch experts with the model {on.trace.header.model}. Order "
        f"of disk reads: {order}"
    )
    table = Table(title, _PARTS, rows, [note.format(base=base) for note in _NOTES])
    if left_out:
        table.footnotes.append(
            f"Not measured: a cache with slots for {' or '.join(left_out)} of the experts, because "
            f"it is too small for one of the policies."
        )
    drawn = lines(rows, lambda row: 100 * row["held"], lambda row: [row["speedup"], None], "name")
    return table, Panel("slots, % of the experts", f"x {base}", drawn, order)


_NOTES = (
    "Slots: share of the experts that have cache slots. n: number of matrices of each expert that "
    "are prefetched. FG: only the gate matrix is prefetched.",
    "Rank: the K experts that the nearest earlier layer predicts are prefetched.",
    "MoL: the experts that all of the P nearest earlier layers predict are prefetched. Each layer "
    "predicts K experts.",
    "K,P: values of K and P at the end of the run, for shallow, middle and deep layers.",
    f"TPOT: median simulated time per output token, without the first {WARM_UP} decode steps.",
    "Answer tok/s: output tokens, divided by the simulated time of prompt and answer.",
    "x base: the row's speed, divided by the speed of '{base}'.",
    "Bytes x base: bytes read per token, divided by the bytes per token of '{base}'.",
    "Hit: share of expert requests that find the expert in memory.",
)
_PARTS = (
    Column("slots", "held", share),
    Column("", "name", left=True),
    Column("TPOT", "tpot_ms_p50", fixed(2), "ms"),
    Column("mean TPOT", "tpot_ms_mean", fixed(2), "ms"),
    Column("x base", "speedup", fixed(3)),
    Column("answer tok/s", "answer_tokens_per_s", fixed(1)),
    Column("MB/tok", "bytes_per_token", fixed(2, 1e6)),
    Column("bytes x base", "bytes_ratio", fixed(2)),
    Column("hit", "hit_rate", share),
    Column("K,P", "votes", left=True),
)


def _measured(on: Played, variant: Variant, expert_bytes: int) -> Row:
    """Replay the trace with one variant and return its metrics."""
    made, outcome = on.play(
        variant.policy, variant.settings, expert_ram=expert_bytes, **variant.changes
    )
    stats, phase = outcome.stats, Phase.DECODE
    decoded = on.trace.arrays["step_phase"] == phase
    step_ms = outcome.step_us / 1000
    steps = step_ms[decoded]
    measured = steps[WARM_UP:] if len(steps) > WARM_UP else steps
    policy, looks_ahead = made.policy, variant.settings.get("prefetch") == "on"
    tuned = isinstance(policy, FIRM) and looks_ahead and policy.tuner.by_group()
    return {
        "name": variant.name,
        "tpot_ms_p50": float(np.median(measured)),
        "tpot_ms_mean": float(measured.mean()),
        "answer_tokens_per_s": 1000 * len(steps) / float(step_ms.sum()),
        "bytes_per_token": (stats.demand_bytes[phase] + stats.prefetch_bytes[phase]) / len(steps),
        "hit_rate": stats.hits[phase] / max(1, stats.requests[phase]),
        "votes": " ".join(f"{k},{p}" for k, p in (tuned or {}).values()),
    }


def measure_votes(on: Played) -> Findings:
    """Return tables and plots of FIRM-MoE's prediction loss for all values of its numbers K and P.

    P is the number of earlier layers that predict the experts of a layer. K is the number of
    experts taken from each prediction, at most the number of experts per token. The loss (eq. 11)
    counts wrong and missing predictions, except for experts that are in memory already. The tables
    also show which K and P the policy chooses when it tunes itself.

    `on` is a recorded run, which is replayed. Raises ConfigError if all experts were in memory,
    because every loss is then 0.
    """
    way = on.options.settings.get("agree", MOL)
    depth = depth_of(way, int(on.trace.arrays["event_ahead"].max()))
    asked = {"n_ahead": depth, "prefetch": "on", "agree": way, **on.options.settings}
    counted, held = _tuner(on, {**asked, "tune": ALL, "tune_tokens": _NEVER}, every=1)
    there = set(counted.groups[1:])
    losses: dict[str, Grid] = {
        name: counted.means(group) for group, name in enumerate(GROUPS) if group in there
    }
    if not any(loss for rows in losses.values() for row in rows for loss in row):
        raise ConfigError(
            "predictions cannot be compared, because all experts were in memory: replay the trace "
            "with fewer expert slots"
        )
    tuned = {way: _tuner(on, {**asked, "tune": way})[0] for way in (ALL, CLIMB)}
    tokens = min(min(each.tokens, each.until) for each in tuned.values())
    title = (
        f"Wrong and missing predictions of experts per layer and token (Figure 6 of FIRM-MoE): "
        f"{on.trace.header.model}, {100 * held:.0f} % of the experts in memory, {tokens} tokens"
    )
    rows, panels = [], []
    for group, grid in losses.items():
        chosen = {way: each.by_group()[group] for way, each in tuned.items()}
        at = {(k, p): loss for p, row in enumerate(grid, 1) for k, loss in enumerate(row, 1)}
        least, best = min((loss, votes) for votes, loss in at.items())
        row: Row = {"group": group, "losses": grid, "best": best, "least": least, **chosen}
        for way, votes in chosen.items():
            row[f"{way}_ratio"] = at[votes] / least if least else None
        rows.append(row | {f"P={p}": min(each) for p, each in enumerate(grid, 1)})
        # The loss over K with a line for each P, the minimum, and the choices of the tuners.
        drawn = [
            Line(
                f"number of earlier layers that predict, P = {p}",
                range(1, len(each) + 1),
                exact(each),
            )
            for p, each in enumerate(grid, 1)
        ]
        drawn += [
            Line(
                f"{name}: each of the P = {p} earlier layers predicts K = {k} experts",
                [k],
                exact([at[k, p]]),
            )
            for name, (k, p) in {
                "smallest loss": best,
                **{f"chosen by --tune {way}": votes for way, votes in chosen.items()},
            }.items()
        ]
        panels.append(
            Panel(
                "experts that each layer predicts (K)",
                "prediction loss (wrong and missing experts) per layer and token",
                drawn,
                f"{group} layers",
            )
        )
    return Findings([Table(title, _columns(len(grid)), rows, [*_BASIS])], panels)


def _tuner(
    on: Played, settings: Mapping[str, Any], every: int | None = None
) -> tuple[Tuner, float]:
    """Replay the trace and return FIRM's tuner at its end.

    The second value is the fraction of the experts that had slots. every: interval of the tuner in
    steps.
    """
    made, _ = on.play(FIRM.name, settings, every)
    assert isinstance(made.policy, FIRM)
    return made.policy.tuner, made.slots.total_bytes / made.shape.all_slot_bytes()


def _columns(depth: int) -> list[Column]:
    def pair(votes: Votes) -> str:
        return f"{votes[0]}, {votes[1]}"

    found = [
        Column("layers", "group", left=True),
        Column("best K, P", "best", pair),
        Column("smallest loss", "least", fixed(3)),
    ]
    for way in (ALL, CLIMB):
        found.append(Column(f"{way}: K, P", way, pair))
        found.append(Column("x best", f"{way}_ratio", fixed(3)))
    return found + [
        Column(f"smallest loss at P={p}", f"P={p}", fixed(3)) for p in range(1, depth + 1)
    ]
