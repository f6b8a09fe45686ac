"""Prefetching watches itself: how well it predicts, and whether it pays."""

from __future__ import annotations

from collections.abc import Collection
from statistics import median

BLOCK_STEPS = 8  # a trial is four blocks, in turn without and with
FIRST_STEPS = 32
PERIOD_STEPS = 256
LONGEST_STEPS = 4096
COUNTED_AT_ONCE = 256
MARGIN = 0.02  # what the other way has to gain before it becomes the rule


class Prediction:
    """Per layer, over all steps seen: of the experts that were asked for ahead, the share that
    was then routed to (precision); of the routed ones, the share asked for (recall)."""

    def __init__(self, n_layers: int) -> None:
        # Of each layer: experts asked for, steps, experts routed to, those of them asked for.
        self._counts = [[0, 0, 0, 0] for _ in range(n_layers)]
        self._layer = -1
        self._experts: Collection[int] = ()
        # (layer, experts asked for, experts routed to): counted later, many at once, since a token
        # waits while a layer is decided.
        self._seen: list[tuple[int, Collection[int], Collection[int]]] = []

    def expect(self, layer: int, experts: Collection[int]) -> None:
        """What was asked for ahead in a layer; the next observe() is compared with it. Both keep
        what they are given."""
        self._layer, self._experts = layer, experts

    def observe(self, layer: int, experts: Collection[int]) -> None:
        """What the layer's tokens really use: distinct experts, skipped ones left out."""
        if layer == self._layer:
            self._seen.append((layer, self._experts, experts))
            if len(self._seen) >= COUNTED_AT_ONCE:
                self._count()
        self._layer = -1

    def _count(self) -> None:
        for layer, asked, routed in self._seen:
            counts = self._counts[layer]
            counts[0] += len(asked)
            counts[1] += 1
            counts[2] += len(routed)
            counts[3] += len(set(asked).intersection(routed))
        self._seen.clear()

    def precision(self) -> list[float | None]:
        """One value a layer; None where nothing was asked for ahead, as in the first. FIRM-MoE's
        utilisation, eq. 8."""
        self._count()
        return [right / asked if asked else None for asked, _, _, right in self._counts]

    def recall(self) -> list[float | None]:
        """As precision(); FIRM-MoE's accuracy, eq. 7."""
        self._count()
        return [right / routed if routed else None for _, _, routed, right in self._counts]

    def size(self) -> list[float | None]:
        """As precision(): how many experts were asked for, the mean over the steps."""
        self._count()
        return [asked / steps if steps else None for asked, steps, _, _ in self._counts]


class Monitor:
    """Decides by trial whether prefetching stays on.

    After FIRST_STEPS decode steps, and later at growing intervals, four blocks of BLOCK_STEPS
    run in turn the other way and as they are; whichever has the lower median step time by more
    than MARGIN is the rule from then on. A trial that confirms the rule doubles the interval,
    from PERIOD_STEPS to LONGEST_STEPS; one that changes it starts over. Step times are handed
    in: the monitor has no clock.
    """

    def __init__(self) -> None:
        self.pays = True
        self._wait = FIRST_STEPS
        self._period = PERIOD_STEPS
        self._trial: list[float] = []

    @property
    def on(self) -> bool:
        """Whether the next step prefetches."""
        if self._wait > 0:
            return self.pays
        other_way = len(self._trial) // BLOCK_STEPS % 2 == 0
        return self.pays != other_way

    def step(self, us: float) -> None:
        """The time of one decode step that ran as `on` said."""
        if self._wait > 0:
            self._wait -= 1
            return
        self._trial.append(us)
        if len(self._trial) < 4 * BLOCK_STEPS:
            return
        blocks = [self._trial[i : i + BLOCK_STEPS] for i in range(0, 4 * BLOCK_STEPS, BLOCK_STEPS)]
        other, same = median(blocks[0] + blocks[2]), median(blocks[1] + blocks[3])
        if other < same * (1 - MARGIN):
            self.pays = not self.pays
            self._period = PERIOD_STEPS
        else:
            self._period = min(2 * self._period, LONGEST_STEPS)
        self._wait = self._period
        self._trial = []
