"""The factors that make nats of a loss table: what lowering experts does to a model's answers.

The model reads a text as prompts, first in its best tier, then with experts that are chosen by
chance in lower tiers, or skipped. The choice is another one in each layer of each micro-batch, so
that all experts have a part in it. Some layers are lowered alone: each part of the depth gets its
own factor by that. Then all layers are: these scale the factors, and say how far they go.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from orchestrator.config import Config
from orchestrator.engine import Engine
from orchestrator.errors import ConfigError
from orchestrator.estimate import LossMeter
from orchestrator.eval.arithmetic import kl_divergence, log_softmax
from orchestrator.eval.compare import Reference
from orchestrator.eval.text import Window
from orchestrator.events import SKIP, SKIP_TIER, Phase, RouteEvent
from orchestrator.losses import Fit, LossTable
from orchestrator.policy import BASELINE, DEFAULT

# Tokens of the calibration text that are read: they settle the factor to a few per cent.
MAX_TOKENS = 2048
# Tokens that share one choice.
_MICRO_BATCH = 32
# Shares of the experts that are lowered or skipped: about what a policy does with them.
_LOWERED, _SKIPPED = 0.5, (0.1, 0.25)
# Parts of the depth with a factor of their own, layers of about as many each.
_PARTS = 8
_SEED = 1

# Gets what is being done, and its share.
Report = Callable[[str, float], None]


class _Way(NamedTuple):
    """A tier that experts are lowered to, the share of them, and the layers."""

    tier: str
    share: float
    layers: frozenset[int]


@dataclass(frozen=True, slots=True)
class Fitting:
    """What factors are fitted with. path: the model; tiers: its own, best first; table: without
    factors; windows: tokens of the text; ram: the cap on the model, None for all that there is.
    What stands before a text counts as well: answers that a model is sure of would say little."""

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
        windows = self._windows()
        steps = iter(range(1, len(alone) + len(ways) + 2))

        def done() -> None:
            report("Fitting KL", next(steps) / (len(alone) + len(ways) + 1))

        factors = np.ones(n_layers)
        with self._read(windows) as reference:
            done()
            for way in alone:
                factors[list(way.layers)] = self._ratio(windows, way, reference, factors)
                done()
            ratios = []
            for way in ways:
                ratios.append(self._ratio(windows, way, reference, factors))
                done()
        scale = math.exp(float(np.mean(np.log(ratios))))
        return Fit(
            tuple((factors * scale).tolist()),
            (*self.tiers, SKIP_TIER),
            f"{sum(each.n_scored for each in windows)} tokens of {self.table.calibration}",
            max(max(ratio / scale, scale / ratio) for ratio in ratios),
        )

    def _windows(self) -> list[Window]:
        """Windows from all over the text."""
        total = sum(map(len, self.windows))
        every = [Window(tokens, 1, "") for tokens in self.windows]
        step = max(1, round(total / MAX_TOKENS))
        return [each for each in every[::step] if each.n_scored > 0]

    def _config(self, **settings: Any) -> Config:
        return Config.build(
            model=self.path,
            high_tier=self.tiers[0],
            ctx=max(8, *(len(window) for window in self.windows)),
            ubatch=_MICRO_BATCH,
            logits_all=True,
            exact_tiers=True,
            force_managed=True,
            threads=self.threads,
            ram=self.ram,
            **settings,
        )

    def _read(self, windows: list[Window]) -> Reference:
        """What the best tier says. The caller closes it."""
        with Engine.open(self._config(policy=BASELINE)) as engine:
            n_vocab = engine.eval(windows[0].tokens[:1], 0).shape[-1]
            reference = Reference(sum(each.n_scored for each in windows), n_vocab)
            try:
                for at, row in enumerate(_rows(engine, windows)):
                    reference.rows[at] = log_softmax(row)
            except BaseException:
                reference.close()
                raise
        return reference

    def _ratio(
        self, windows: list[Window], way: _Way, reference: Reference, factors: np.ndarray
    ) -> float:
        """The mean KL from the best tier, by what these factors foresee. Raises ConfigError where
        there is none."""
        settings = {"policy": DEFAULT, "low_tier": way.tier, "prefetch": "off"}
        random = np.random.default_rng(_SEED)
        table = replace(self.table, fit=Fit(tuple(factors.tolist()), (), "", 1.0))
        with Engine.open(self._config(**settings)) as engine:
            estimate = table.estimate(engine.plan.tier_names, self.tiers[0])
            if estimate is None:
                raise ConfigError(f"the loss table lacks {way.tier}")
            driver, store = engine.driver, engine.store
            driver.meter = meter = LossMeter(estimate, exact=True)
            low = SKIP if way.tier == SKIP_TIER else 1

            def route(event: RouteEvent) -> None:
                decision = store.decision
                if event.layer in way.layers:
                    decision.tier_array[random.random(len(decision.tier)) < way.share] = low
                store.apply(decision)
                meter.decided(event, store.view, decision)

            driver.set_route(route)
            lost = [
                kl_divergence(reference.row(at).astype(np.float64), log_softmax(row))
                for at, row in enumerate(_rows(engine, windows))
            ]
        measured, foreseen = float(np.mean(lost)), meter.mean(Phase.PREFILL) or 0.0
        if not (measured > 0 and foreseen > 0):
            raise ConfigError("the model says the same in every precision")
        return measured / foreseen


def _rows(engine: Engine, windows: Sequence[Window]) -> Iterator[np.ndarray]:
    """Logits float32 [n_vocab] that predict each scored token, window by window."""
    for window in windows:
        before = window.first - 1
        for part in engine.eval_each(window.tokens[:-1], 0, Phase.PREFILL):
            yield from part[before:]
            before = max(0, before - len(part))
