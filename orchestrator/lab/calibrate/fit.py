"""The factors that make nats of a loss table: what lowering experts does to a model's answers.

The model reads a text as prompts, first in its best tier, then with experts that are chosen by
chance in lower tiers, or skipped. The choice is another one in each layer of each micro-batch, so
that all experts have a part in it. Some layers are lowered alone: each part of the depth gets its
own factor by that. Then all layers are, in one tier after the other: each gets its own scale, since
large moves change answers less than in proportion. A token's first expert is never skipped, as no
policy skips it: that costs more than the losses of the others foretell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gguf_tools.process import private_bytes
from orchestrator.config import Config
from orchestrator.cost.losses import Fit, LossTable
from orchestrator.engine.engine import Engine
from orchestrator.engine.loss_meter import LossMeter
from orchestrator.errors import ConfigError
from orchestrator.events import SKIP, SKIP_TIER, Phase, RouteEvent
from orchestrator.lab.eval.arithmetic import geometric_mean
from orchestrator.lab.eval.compare import Reference
from orchestrator.lab.eval.judge import Judge
from orchestrator.lab.eval.perplexity import score_text
from orchestrator.lab.eval.run import Report, read_reference
from orchestrator.lab.eval.text import Window
from orchestrator.policy import BASELINE, DEFAULT

# Tokens of the calibration text that are read: they settle the factor to a few per cent.
MAX_TOKENS = 2048
# Tokens that share one choice; fewer where the first expert of each of them is not skipped, so that
# some are.
_MICRO_BATCH, _FEW = 32, 4
# Shares of the experts that are lowered or skipped: about what a policy does with them.
_LOWERED, _SKIPPED = 0.5, (0.1, 0.25)
# Parts of the depth with a factor of their own, layers of about as many each.
_PARTS = 8
_SEED = 1
# What of its own a process has that begins to load a model, as a chat does. One that has measured
# has more: malloc keeps what was given back, and there are logits to compare with.
_OWN_BYTES = 38 << 20


class _Way(NamedTuple):
    """A tier that experts are lowered to, the share of them, and the layers."""

    tier: str
    share: float
    layers: frozenset[int]


@dataclass(frozen=True, slots=True)
class Fitting:
    """What factors are fitted with. path: the model; tiers: its own, best first; table: without
    factors; windows: tokens of the text; ram: the cap on the model, None for all that there is.
    Every token of a window is scored but its first one."""

    path: Path
    tiers: Sequence[str]
    table: LossTable
    windows: Sequence[list[int]]
    threads: int | None
    ram: int | None

    def fit(self, report: Report) -> Fit:
        """Raises ConfigError where nothing can be compared, and what an engine raises."""
        n_layers = len(self.table.counts)
        every = frozenset(range(n_layers))
        parts = [frozenset(part.tolist()) for part in np.array_split(range(n_layers), _PARTS)]
        low = _Way(self.tiers[-1], _LOWERED, every)
        if len(self.tiers) == 1:
            low = _Way(SKIP_TIER, _SKIPPED[-1], every)
        alone = [low._replace(layers=part) for part in parts if part]
        ways = [_Way(tier, _LOWERED, every) for tier in self.tiers[1:]]
        ways += [_Way(SKIP_TIER, share, every) for share in _SKIPPED]
        # No factor is fitted by this way: it shows how far off the estimate gets.
        checked = [_Way(tier, 1.0, every) for tier in self.tiers[1:][-1:]]
        windows = self._windows()
        n_steps = len(alone) + len(ways) + len(checked) + 1
        steps = iter(range(1, n_steps + 1))

        def done() -> None:
            report("Fitting KL", next(steps) / n_steps)

        factors = np.ones(n_layers)
        with self._read(windows) as reference:
            done()
            for way in alone:
                factors[list(way.layers)] = self._ratio(windows, way, reference, factors)
                done()
            ratios = []
            for way in (*ways, *checked):
                ratios.append(self._ratio(windows, way, reference, factors))
                done()
        scale = geometric_mean(ratios[: len(ways)])
        of_tiers = {
            tier: geometric_mean(
                [ratio for way, ratio in zip(ways, ratios, strict=False) if way.tier == tier]
            )
            for tier in (*self.tiers[1:], SKIP_TIER)
        }
        # The best tier loses nothing, or as little as the next one.
        of_tiers = {self.tiers[0]: next(iter(of_tiers.values())), **of_tiers}
        measured = zip((*ways, *checked), ratios, strict=True)
        off = [ratio / of_tiers[way.tier] for way, ratio in measured]
        return Fit(
            tuple((factors * scale).tolist()),
            tuple(of_tiers),
            f"{sum(each.n_scored for each in windows)} tokens of {self.table.calibration}",
            max(max(each, 1 / each) for each in off),
            tuple(each / scale for each in of_tiers.values()),
        )

    def _windows(self) -> list[Window]:
        """Windows from all over the text."""
        total = sum(map(len, self.windows))
        every = [Window(tokens, 1, "") for tokens in self.windows]
        step = max(1, round(total / MAX_TOKENS))
        return [each for each in every[::step] if each.n_scored > 0]

    def _config(self, micro_batch: int = _MICRO_BATCH, **settings: Any) -> Config:
        return Config.build(
            model=self.path,
            high_tier=self.tiers[0],
            ctx=max(8, *(len(window) for window in self.windows)),
            ubatch=micro_batch,
            logits_all=True,
            exact_tiers=True,
            force_managed=True,
            threads=self.threads,
            ram=self.ram,
            beside=max(0, private_bytes() - _OWN_BYTES),
            **settings,
        )

    def _read(self, windows: list[Window]) -> Reference:
        """What the best tier says. The caller closes it."""
        with Engine.open(self._config(policy=BASELINE)) as engine:
            return read_reference(engine, windows, prefill=True)

    def _ratio(
        self, windows: list[Window], way: _Way, reference: Reference, factors: np.ndarray
    ) -> float:
        """The mean KL from the best tier, by what these factors foresee. Raises ConfigError where
        there is none."""
        settings = {"policy": DEFAULT, "low_tier": way.tier, "prefetch": "off"}
        micro_batch = _FEW if way.tier == SKIP_TIER else _MICRO_BATCH
        random = np.random.default_rng(_SEED)
        table = replace(self.table, fit=Fit(tuple(factors.tolist()), (), "", 1.0))
        with Engine.open(self._config(micro_batch, **settings)) as engine:
            estimate = table.estimate(engine.plan.tier_names, self.tiers[0])
            if estimate is None:
                raise ConfigError(f"the loss table lacks {way.tier}")
            driver, store = engine.driver, engine.store
            driver.meter = meter = LossMeter(estimate, exact=True)
            low = SKIP if way.tier == SKIP_TIER else 1

            def route(event: RouteEvent) -> None:
                decision = store.decision
                if event.layer in way.layers:
                    chosen = random.random(len(decision.tier)) < way.share
                    if low == SKIP and event.k > 1:
                        chosen[_first_choices(event)] = False
                    decision.tier_array[chosen] = low
                store.apply(decision)
                meter.decided(event, store.view, decision)

            driver.set_route(route)
            scores = score_text(Judge(engine, prefill=True), windows, against=reference)
        assert scores.kl is not None
        measured, foreseen = float(np.mean(scores.kl)), meter.mean(Phase.PREFILL) or 0.0
        if not (measured > 0 and foreseen > 0):
            raise ConfigError("the model says the same in every precision")
        return measured / foreseen


def _first_choices(event: RouteEvent) -> np.ndarray:
    """The expert with the highest gate of each token, int [T]."""
    first: np.ndarray = event.ids_array[
        np.arange(event.n_tokens), event.weights_array.argmax(axis=1)
    ]
    return first
