"""What an answer of an engine read, and what its first token was chosen from."""

from __future__ import annotations

import numpy as np

from orchestrator.engine.engine import Engine, Sampling

GREEDY = Sampling(temp=0.0)


def evaluated(engine: Engine, prompt: list[int], n: int = 8) -> int:
    """How many tokens of a prompt are read for its answer of n tokens at most."""
    list(engine.generate(prompt, GREEDY, n))
    assert engine.last_stats is not None
    return engine.last_stats.evaluated_tokens


def first_logits(engine: Engine, prompt: list[int]) -> np.ndarray:
    """What an answer's first token is chosen from."""
    list(engine.generate(prompt, GREEDY, 1))
    return engine._loaded.context.logits().copy()
