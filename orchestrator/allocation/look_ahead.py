"""Loading experts ahead of their use: its settings, how well it predicts, and whether it pays.

The look-ahead itself, g_hat of layer l+1 = Softmax(h of layer l * W_g of layer l+1) (DyMoE, eq. 6),
is computed in the model's graph and arrives with the route event, best first.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, TypeVar

from orchestrator.errors import ConfigError
from orchestrator.events import Phase, StepReport
from orchestrator.settings import Settings, setting

AUTO, ON, OFF = PREFETCHES = ("auto", "on", "off")

L = TypeVar("L", bound="LookAhead")


@dataclass(frozen=True)
class LookAhead(Settings):
    """Settings of policies that prefetch what the next layers are predicted to choose."""

    prefetch: str = setting(
        AUTO, "Load ahead: on, off, or auto: while it pays.", metavar="WHEN", choices=PREFETCHES
    )
    n_ahead: int | None = setting(
        None, "How many layers ahead experts are predicted.", within=(0, 4), shown="by policy"
    )

    @property
    def usual_ahead(self) -> int:
        """How many layers ahead the policy wants where nothing is asked for."""
        return 1

    def with_usual(self: L) -> L:
        """The same with the policy's usual n_ahead where nothing was asked for."""
        return self if self.n_ahead is not None else replace(self, n_ahead=self.usual_ahead)

    def limited(self: L, depth: int, asked: Collection[str]) -> L:
        """The same where routers were only asked `depth` layers ahead. asked: names of what was
        set on purpose. Raises ConfigError where that cannot be had."""
        n_ahead = self.with_usual().n_ahead or 0
        if "n_ahead" in asked and n_ahead > depth:
            raise ConfigError(
                f"the trace looks {depth} layers ahead, not {n_ahead}: record it with a "
                f"policy that looks ahead"
            )
        if "prefetch" in asked and self.prefetch == ON and depth == 0:
            raise ConfigError(
                "--prefetch on: the trace does not look ahead, record it with a policy that does"
            )
        return replace(self, n_ahead=min(n_ahead, depth))


BLOCK_STEPS = 8  # a trial is four blocks, in turn without and with
FIRST_STEPS = 32
PERIOD_STEPS = 256
LONGEST_STEPS = 4096
COUNTED_AT_ONCE = 256
MARGIN = 0.02  # by this share the other way has to be faster to become the rule


class PredictionScore:
    """Per layer, over all steps seen: of the experts that were asked for ahead, the share that
    was then routed to (precision); of the routed ones, the share asked for (recall)."""

    def __init__(self, n_layers: int) -> None:
        # Of each layer: experts asked for, steps, experts routed to, those of them asked for.
        self._counts = [[0, 0, 0, 0] for _ in range(n_layers)]
        self._layer = -1
        self._experts: Collection[int] = ()
        # (layer, experts asked for, experts routed to). They are counted later, many at once, since
        # a token waits while a layer is decided.
        self._seen: list[tuple[int, Collection[int], Collection[int]]] = []

    def expect(self, layer: int, experts: Collection[int]) -> None:
        """What was asked for ahead in a layer; the next observe() is compared with it. Neither
        copies what it is given."""
        self._layer, self._experts = layer, experts

    def observe(self, layer: int, experts: Collection[int]) -> None:
        """What the layer's tokens really use: distinct experts, skipped ones left out."""
        if layer == self._layer:
            self._seen.append((layer, self._experts, experts))
            if len(self._seen) >= COUNTED_AT_ONCE:
                self._count()
        self._layer = -1

    def _ratios(self, part: int, whole: int) -> list[float | None]:
        self._count()
        return [each[part] / each[whole] if each[whole] else None for each in self._counts]

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
        return self._ratios(3, 0)

    def recall(self) -> list[float | None]:
        """As precision(); FIRM-MoE's accuracy, eq. 7."""
        return self._ratios(3, 2)

    def size(self) -> list[float | None]:
        """As precision(): how many experts were asked for, the mean over the steps."""
        return self._ratios(0, 1)


class Prefetching:
    """Whether a policy loads ahead at the moment, and how well that predicts.

    asked: AUTO, ON or OFF. score: of answers of one token. pays: what trials found, if it is AUTO.

    After FIRST_STEPS decode steps, and later at growing intervals, four blocks of BLOCK_STEPS
    run in turn the other way and as they are; whichever has the lower median step time by more
    than MARGIN is the rule from then on. A trial that confirms the rule doubles the interval,
    from PERIOD_STEPS to LONGEST_STEPS; one that changes it starts over. Step times are handed
    in: there is no clock here.
    """

    def __init__(self, asked: str, n_layers: int) -> None:
        self.asked, self.pays = asked, True
        self.score = PredictionScore(n_layers)
        self._wait, self._period = FIRST_STEPS, PERIOD_STEPS
        self._trial: list[float] = []

    @property
    def on(self) -> bool:
        """Whether the next step loads ahead."""
        if self.asked != AUTO:
            return self.asked == ON
        other_way = self._wait <= 0 and len(self._trial) // BLOCK_STEPS % 2 == 0
        return self.pays != other_way

    def step_done(self, report: StepReport) -> None:
        """Learns from a decode step of one token, which ran as `on` said."""
        if self.asked != AUTO or report.phase != Phase.DECODE or report.n_tokens != 1:
            return
        if self._wait > 0:
            self._wait -= 1
            return
        self._trial.append(report.us)
        if len(self._trial) < 4 * BLOCK_STEPS:
            return
        blocks = [self._trial[i : i + BLOCK_STEPS] for i in range(0, 4 * BLOCK_STEPS, BLOCK_STEPS)]
        other, same = median(blocks[0] + blocks[2]), median(blocks[1] + blocks[3])
        if other < same * (1 - MARGIN):
            self.pays = not self.pays
            self._period = PERIOD_STEPS
        else:
            self._period = min(2 * self._period, LONGEST_STEPS)
        self._wait, self._trial = self._period, []

    def report(self) -> dict[str, Any]:
        """prefetch: "off", "on" or "paused", while it does not pay; recall and precision of the
        look-ahead per layer, since the engine started."""
        auto = ON if self.pays else "paused"
        return {
            "prefetch": auto if self.asked == AUTO else self.asked,
            "recall": self.score.recall(),
            "precision": self.score.precision(),
        }

    @property
    def note(self) -> str:
        """The end of a mode line: empty unless it does not pay."""
        return "" if self.pays else ", prefetch paused"
