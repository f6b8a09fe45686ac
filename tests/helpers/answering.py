"""What an answer of an engine read, and what its first token was chosen from."""

from orchestrator.runtime.engine import Sampling

GREEDY = Sampling(temp=0.0)


def evaluated(engine, prompt, n=8):
    """How many tokens of a prompt are read for its answer of n tokens at most."""
    list(engine.generate(prompt, GREEDY, n))
    return engine.last_stats.evaluated_tokens


def first_logits(engine, prompt):
    """What an answer's first token is chosen from."""
    list(engine.generate(prompt, GREEDY, 1))
    return engine._loaded.context.logits().copy()
