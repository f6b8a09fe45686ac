"""Answers of a runtime to prompts that are tokens."""

import json
from contextlib import closing


def submitted(runtime, prompt, n=8, **fields):
    """The running answer to a prompt, of n likeliest tokens unless the model ends it. fields: more
    of the request."""
    body = {"prompt": prompt, "n_predict": n, "temperature": 0, "return_tokens": True, **fields}
    return runtime.submit(json.dumps(body).encode(), "/completion")


def answered(runtime, prompt, n=8, **fields):
    """What came of it: `tokens`, `content`, `stop_type` and `timings`, of which prompt_n counts the
    tokens that were read and cache_n those that were not read again; and the costs."""
    with closing(submitted(runtime, prompt, n, **fields)) as answer:
        (found,) = answer
        return found | {"costs": answer.costs()}


def evaluated(runtime, prompt, n=8):
    """How many tokens of a prompt are read for its answer of n tokens at most."""
    return answered(runtime, prompt, n)["timings"]["prompt_n"]


def first_logits(runtime, prompt):
    """What an answer's first token is chosen from."""
    answered(runtime, prompt, 1)
    return runtime.inside.context.logits().copy()
