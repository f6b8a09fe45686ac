"""Answers of a runtime to prompts that are token lists."""

import json
from contextlib import closing


def submitted(runtime, prompt, n=8, **fields):
    """Submit a prompt for a greedy answer of at most n tokens. Return the running answer.

    fields: further fields of the request.
    """
    body = {"prompt": prompt, "n_predict": n, "temperature": 0, "return_tokens": True, **fields}
    return runtime.submit(json.dumps(body).encode(), "/completion")


def answered(runtime, prompt, n=8, **fields):
    """Return the complete answer to a prompt and its costs.

    Its keys are `tokens`, `content`, `stop_type`, `timings` and `costs`. In `timings`, prompt_n
    counts the tokens read and cache_n the tokens reused.
    """
    with closing(submitted(runtime, prompt, n, **fields)) as answer:
        (found,) = answer
        return found | {"costs": answer.costs()}


def evaluated(runtime, prompt, n=8):
    """Return the number of prompt tokens that are read for an answer of at most n tokens."""
    return answered(runtime, prompt, n)["timings"]["prompt_n"]


def first_logits(runtime, prompt):
    """Return the logits of the first token of an answer."""
    answered(runtime, prompt, 1)
    return runtime.inside.context.logits().copy()
