"""Prefetching of experts: its settings, its accuracy, and whether it makes decoding faster.

The prediction, g_hat of layer l+1 = Softmax(h of layer l * W_g of layer l+1) (DyMoE, eq. 6), is
computed in the model's graph and arrives with the route event, best first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, ClassVar, TypeVar

from orchestrator.errors import ConfigError
from orchestrator.events import Phase, StepReport
from orchestrator.settings import Settings, setting

AUTO, ON, OFF = PREFETCHES = ("auto", "on", "off")

L = TypeVar("L", bound="LookAhead")


@dataclass(frozen=True)
class LookAhead(Settings):
    """Settings of policies that predict the experts of the next layers, and prefetch them."""

    prefetch: str = setting(
        AUTO,
        "Prefetch the experts that are predicted for the next layers: on, off, or auto (while that "
        "is faster).",
        metavar="WHEN",
        choices=PREFETCHES,
    )
    n_ahead: int | None = setting(
        None,
        "Number of layers ahead for which experts are predicted.",
        within=(0, 4),
        shown="by policy",
    )

    usual: ClassVar[Mapping[str, Any]] = {"n_ahead": 1}

    def limited(self: L, depth: int, asked: Collection[str]) -> L:
        """Return these settings with n_ahead reduced to at most `depth`, for the replay of a trace.

        The setting n_ahead is the number of layers for which a policy predicts experts. A replay
        has only the predictions that are recorded in the trace.

        depth: for how many layers ahead the trace predicts experts. 0 means no predictions.
        asked: the names of the settings that the user set.

        Raises ConfigError if the user set n_ahead to more than `depth`, or set prefetch to "on" for
        a trace without predictions.
        """
        n_ahead = self.with_usual().n_ahead or 0
        if "n_ahead" in asked and n_ahead > depth:
            raise ConfigError(
                f"the trace predicts experts {depth} layers ahead, not {n_ahead}: record it with a "
                f"policy that predicts them {n_ahead} layers ahead"
            )
        if "prefetch" in asked and self.prefetch == ON and depth == 0:
            raise ConfigError(
                "--prefetch on needs a trace with predicted experts: record it with a policy that "
                "prefetches"
            )
        return replace(self, n_ahead=min(n_ahead, depth))


BLOCK_STEPS = 8  # a trial has four blocks, alternating between two modes
FIRST_STEPS = 32  # before the first trial
# Steps from a trial to the next. The interval is reset after a change of the mode. It is doubled
# after a trial without a change, up to the longest interval.
PERIOD_STEPS = 256
LONGEST_STEPS = 4096
COUNTED_AT_ONCE = 256
MARGIN = 0.02  # the opposite mode has to be faster by this share to become current


class PredictionScore:
    """Measures, for each layer, how well the prefetched experts match the experts that are used.

    Precision is the fraction of prefetched experts that are used. Recall is the fraction of used
    experts that were prefetched.
    """

    def __init__(self, n_layers: int) -> None:
        # For each layer: experts prefetched, steps, experts routed to, routed and prefetched.
        self._counts = [[0, 0, 0, 0] for _ in range(n_layers)]
        self._layer = -1
        self._experts: Collection[int] = ()
        # (layer, experts prefetched, experts routed to). Counting is deferred, because a token
        # waits during each decision.
        self._seen: list[tuple[int, Collection[int], Collection[int]]] = []

    def expect(self, layer: int, experts: Collection[int]) -> None:
        """Remember which experts were prefetched in a layer, for the next call of observe().

        The collection is not copied, so the caller must not change it.
        """
        self._layer, self._experts = layer, experts

    def observe(self, layer: int, experts: Collection[int]) -> None:
        """Compare the experts that a layer's tokens use with those that expect() remembered.

        The result is counted for precision(), recall() and size(). Without a call of expect() for
        this layer, nothing is counted. experts: distinct experts, without those that are skipped.
        """
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
        """Return the fraction of prefetched experts that were used, for each layer.

        The value is None for a layer without prefetches, such as the first. FIRM-MoE calls it
        utilisation (eq. 8).
        """
        return self._ratios(3, 0)

    def recall(self) -> list[float | None]:
        """Return the fraction of used experts that were prefetched, for each layer.

        The value is None for a layer without prefetches, such as the first. FIRM-MoE calls it
        accuracy (eq. 7).
        """
        return self._ratios(3, 2)

    def size(self) -> list[float | None]:
        """Return the mean number of experts in a prediction, for each layer.

        A prediction is the set of experts that were prefetched in a layer for one pass through the
        model. The value is None for a layer without predictions, such as the first.
        """
        return self._ratios(0, 1)


class Prefetching:
    """Decides whether a policy prefetches experts, and measures how good its predictions are.

    With the setting "auto", prefetching is on at first. From time to time, a trial compares the
    time of decode steps with and without prefetching. The clearly faster mode is then used until
    the next trial.

    - asked: the setting: "auto", "on" or "off".
    - pays: whether the latest trial decided for prefetching. True before the first trial.
    - score: the accuracy of the predictions in decode steps with one token.
    """

    def __init__(self, asked: str, n_layers: int) -> None:
        self.asked, self.pays = asked, True
        self.score = PredictionScore(n_layers)
        self._wait, self._period = FIRST_STEPS, PERIOD_STEPS
        self._trial: list[float] = []

    @property
    def on(self) -> bool:
        """Whether the next step should prefetch experts."""
        if self.asked != AUTO:
            return self.asked == ON
        other_way = self._wait <= 0 and len(self._trial) // BLOCK_STEPS % 2 == 0
        return self.pays != other_way

    def step_done(self, report: StepReport) -> None:
        """Count a finished decode step. If a trial is under way, record the time of the step.

        A trial compares steps with and without prefetching. After its last step, the other mode is
        chosen if it was clearly faster. Steps with several tokens are ignored.
        """
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
        """Return the state of prefetching and the accuracy of its predictions, by name.

        - prefetch: the state: "on", "off", or "paused" if a trial was faster without prefetching.
        - recall: for each layer, the fraction of used experts that were prefetched.
        - precision: for each layer, the fraction of prefetched experts that were used.
        """
        auto = ON if self.pays else "paused"
        return {
            "prefetch": auto if self.asked == AUTO else self.asked,
            "recall": self.score.recall(),
            "precision": self.score.precision(),
        }

    @property
    def note(self) -> str:
        """A text for the end of the status line: empty unless prefetching is paused."""
        return "" if self.pays else ", prefetch paused"
