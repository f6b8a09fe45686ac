"""What a placement of experts loses in expectation: a loss table times what an answer uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from orchestrator.allocation.placement import (
    IMPORTANCE,
    MAX_WIDTHS,
    PLAIN,
    PlacementSettings,
    best_of_each_width,
    bit_budget,
    importance,
    place,
)
from orchestrator.allocation.pools import nominal_bits, shares
from orchestrator.cost.losses import LossTable
from orchestrator.lab.eval import arithmetic
from orchestrator.lab.eval.arithmetic import Estimate
from orchestrator.lab.study.context import Usage

PAPER, NO_PRIOR, OURS = "prompt, losses alone (the paper)", "prompt, weighted", "prompt and profile"
ALIKE = "prompt and profile, losses alone"
STATIC, RANDOM, ORACLE = "profile alone", "random", "the answer itself"
FORMS = (PAPER, NO_PRIOR, ALIKE, OURS, STATIC, RANDOM, ORACLE)

_SEED = 1


@dataclass(frozen=True, slots=True)
class NearTiers:
    """The near tiers of a file, the widest first: names, and nominal bits, all different."""

    names: tuple[str, ...]
    bits: tuple[int, ...]

    @classmethod
    def of(cls, tiers: Sequence[str]) -> NearTiers:
        """Of a file's tiers, best first: the best one of each width below the best tier."""
        names = best_of_each_width(tiers[1:])[-MAX_WIDTHS:]
        return cls(tuple(names), tuple(map(nominal_bits, names)))

    def uniform(self, bits: float) -> str | None:
        """The tier in which every expert has so many bits; None where the file has none."""
        return self.names[self.bits.index(int(bits))] if bits in self.bits else None


@dataclass(frozen=True, slots=True)
class Losses:
    """What each expert loses: near float64 [n_layers, n_expert, n_near], best [n_layers, n_expert]
    in the file's best tier; power [n_layers, n_expert], the mean square of its output."""

    near: np.ndarray
    best: np.ndarray
    power: np.ndarray

    @classmethod
    def of(cls, table: LossTable, best: str, near: NearTiers) -> Losses | None:
        """Out of a loss table; None where it lacks one of the near tiers. A best tier that it lacks
        is what it was measured against."""
        found, of_best = table.of_tiers(near.names), table.of_tiers([best])
        if found is None:
            return None
        none = np.zeros(found.shape[:2])
        return cls(found, none if of_best is None else of_best[..., 0], np.nan_to_num(table.power))


@dataclass(frozen=True, slots=True)
class Expected:
    """Squared errors of the answers' expert outputs, as shares of these outputs' squares: chosen,
    with bits by the prefix split; uniform, with the same hot experts and the same bits in all
    others, None where no tier has so many; best, the least that any choice of bits has with the
    same hot experts. gain: the share of the uniform loss that choosing takes away, its error by
    text; None where there is nothing to compare with."""

    chosen: float
    uniform: float | None
    best: float
    gain: Estimate | None

    @property
    def possible(self) -> float | None:
        """The share that the best choice takes away."""
        return 1 - self.best / self.uniform if self.uniform else None

    @property
    def reached(self) -> float | None:
        """The gain as a share of the possible one; None where nothing could be gained."""
        return self.gain.value / self.possible if self.gain and self.possible else None


def scores_of(
    form: str, usage: Usage, profile: np.ndarray, settings: PlacementSettings, k: int, at: int
) -> np.ndarray:
    """The importance of each expert [n_layers, n_expert] by one of FORMS. profile: what the others
    used; at: which of the windows it is, for the seed of RANDOM."""
    if form == ORACLE:
        return shares(usage.answer)
    if form == STATIC:
        return shares(profile)
    if form == RANDOM:
        return shares(np.random.default_rng((_SEED, at)).random(usage.counts.shape))
    asked = settings if form in (OURS, ALIKE) else replace(settings, prior_tokens=0.0)
    return importance(usage.counts, usage.gates, profile, asked, k)


def expected_loss(
    form: str,
    usages: Sequence[Usage],
    profile: np.ndarray,
    near: NearTiers,
    losses: Losses,
    n_hot: int,
    settings: PlacementSettings,
    k: int,
) -> Expected:
    """Of one form over several prompts and answers. The prefix split is that of each layer, with no
    limit by slots."""
    weights = PLAIN if form in (PAPER, ALIKE) else IMPORTANCE
    asked = settings if form == OURS else replace(settings, near_weights=weights)
    every = np.concatenate([losses.best[:, :, None], losses.near], axis=2)
    name = near.uniform(settings.near_bits)
    column = None if name is None else 1 + near.names.index(name)
    chosen, uniform, best, power = np.zeros((4, len(usages)))
    for at, usage in enumerate(usages):
        scores = scores_of(form, usage, profile, settings, k, at)
        tiers = place(scores, n_hot, losses.near, near.bits, asked)
        chosen[at] = _lost(usage.answer, every, tiers)
        if column is not None:
            uniform[at] = _lost(usage.answer, every, np.where(tiers == 0, 0, column))
        power[at] = (usage.answer * losses.power).sum()
        budget = bit_budget(scores.shape[1] - n_hot, settings)
        for used, lost, in_best, of in zip(
            usage.answer, losses.near, losses.best, tiers, strict=True
        ):
            cold = of > 0
            best[at] += (used * in_best)[~cold].sum()
            best[at] += least_loss((used[:, None] * lost)[cold], near.bits, budget)
    total = power.sum()
    return Expected(
        chosen.sum() / total,
        None if column is None else uniform.sum() / total,
        best.sum() / total,
        arithmetic.share(uniform - chosen, uniform) if uniform.any() else None,
    )


def least_loss(loss: np.ndarray, bits: Sequence[int], budget_bits: int) -> float:
    """The least sum of losses of experts that take at most budget_bits together, whichever has how
    many: what no prefix split can go below. loss: float64 [E_n, len(bits)]; bits: falling; the
    budget is enough for all in the narrowest one."""
    extra = [width - bits[-1] for width in bits]
    spare = budget_bits - len(loss) * bits[-1]
    least = np.zeros(spare + 1)  # of the experts so far, by the bits that they may take more
    for of_expert in loss:
        ways = np.full((len(bits), spare + 1), np.inf)
        for way, more, lost in zip(ways, extra, of_expert, strict=True):
            if more <= spare:
                way[more:] = least[: spare + 1 - more] + lost
        least = ways.min(axis=0)
    return float(least[-1])


def _lost(used: np.ndarray, every: np.ndarray, tiers: np.ndarray) -> float:
    """Sum of used [n_layers, n_expert] times the losses [..., n_tiers] in these tiers."""
    lost = np.take_along_axis(every, tiers[:, :, None].astype(np.int64), axis=2)[:, :, 0]
    return float((used * lost).sum())
