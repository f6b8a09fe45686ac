"""Reading what was lowered or skipped, so that it is there when it is asked for again."""

from __future__ import annotations

from collections.abc import Iterable

from orchestrator.events import DecisionBuffer
from orchestrator.policy.base import ModelShape

# What is lowered again within so many steps is read. What comes up once is worth no slot.
AGAIN_STEPS = 4
# Experts that reads may be ahead of their rate.
_BURST_EXPERTS = 8


class ReadBehind:
    """Asks for the high copies of experts that were lowered twice within a few steps, within a
    rate."""

    def __init__(self, shape: ModelShape, rate: int) -> None:
        """rate: bytes a second, 0 for no limit."""
        self._rate, self._granted = rate, 0.0
        self._bytes = [shape.expert_slot_bytes(layer, 0) for layer in range(shape.n_layers)]
        never = -AGAIN_STEPS - 1
        self._lowered_at = [[never] * shape.n_expert for _ in range(shape.n_layers)]
        self._pending: tuple[int, list[int]] = (0, [])

    def ask(
        self,
        step: int,
        layer: int,
        lowered: Iterable[int],
        resident: memoryview,
        out: DecisionBuffer,
    ) -> None:
        """Asks for what the layer before left, as far as the rate goes: for the layer that is being
        computed, the store takes no prefetch. lowered: experts of this layer; resident: what its
        experts have in memory, best tier or ABSENT."""
        before, experts = self._pending
        if experts:
            n, n_bytes = len(experts), self._bytes[before]
            if self._rate:
                n = min(n, int(max(0.0, self._granted) // n_bytes))
                self._granted -= n * n_bytes
            out.prefetch_all(before, experts[:n], 0)
        lowered_at, again = self._lowered_at[layer], []
        for expert in lowered:
            if resident[expert] != 0:
                if step - lowered_at[expert] <= AGAIN_STEPS:
                    again.append(expert)
                lowered_at[expert] = step
        self._pending = layer, again

    def step_done(self, us: float) -> None:
        """The rate grants what a step of so many microseconds may read."""
        most = _BURST_EXPERTS * self._bytes[0]
        self._granted = min(self._granted + self._rate * us / 1e6, most)
