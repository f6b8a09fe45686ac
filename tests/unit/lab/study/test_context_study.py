"""What a prompt says of its answer's experts, against counts by hand."""

from __future__ import annotations

import numpy as np
import pytest

from orchestrator.eval.text import Window
from orchestrator.lab.study.activations import ROUTER_INPUT, ROUTER_LOGITS
from orchestrator.lab.study.context import (
    ALIKE,
    ORACLE,
    OWN,
    RIGHT,
    USUAL_PRIOR,
    WRONG,
    Usage,
    _by_domain,
    _by_length,
    blend,
    captured,
    choices,
    cosines,
    prompt_tokens,
    usage_of,
)


def usage(domain: str, prompt: list[float], answer: list[float], n_prompt: int = 20) -> Usage:
    counts = np.array([prompt])
    return Usage(domain, n_prompt, 10, counts, counts, np.array([answer]))


def test_what_the_hot_experts_capture():
    scores, used = np.array([[0.1, 0.5, 0.4], [0.9, 0.1, 0.9]]), np.array([[5, 2, 3], [1, 7, 2]])
    assert captured(scores, used, 1) == 2 + 1  # ties by index
    assert captured(scores, used, 2) == 5 + 3
    assert cosines(np.array([[1.0, 0.0]]), np.array([[3.0, 4.0]])) == pytest.approx([0.6])


def test_every_choice_knows_what_it_should():
    """Others are those of the same domain, without the text itself; the wrong profile is that of
    other domains; each text counts alike in them."""
    usages = [
        usage("chat", [8, 0], [0, 9]),
        usage("chat", [0, 30], [0, 30]),
        usage("chat", [1, 0], [1, 0]),
        usage("documents", [3, 1], [3, 1]),
    ]
    known = choices(usages, 0, 1)
    assert known[OWN] == pytest.approx(np.array([[1.0, 0.0]]))
    assert known[RIGHT] == pytest.approx(np.array([[0.5, 0.5]]))
    assert known[WRONG] == pytest.approx(np.array([[0.75, 0.25]]))
    assert known[ORACLE] == pytest.approx(np.array([[0.0, 9.0]]))
    assert known[blend(RIGHT, 16)] == pytest.approx(np.array([[(8 + 8) / 24, 8 / 24]]))
    assert choices(usages, 3, 1)[RIGHT] is None
    rows = {(row["domain"], row["by"]): row for row in _by_domain(usages, [known] * 4, 1)}
    assert rows["chat", ALIKE]["mass"] == 0.5
    assert rows["chat", OWN]["mass"] == 1 / 40
    assert rows["documents", RIGHT]["mass"] == 0.75


def test_prompts_are_grouped_by_their_length():
    usages = [usage("", [1, 0], [1, 0], n) for n in (10, 31, 32, 200, 600)]
    every = [choices(usages, at, 1) for at in range(5)]
    rows = list(_by_length(usages, every, 1))
    assert [row["tokens"] for row in rows] == ["10 to 31", "32 to 32", "200 to 200", "600 to 600"]
    assert [row["n"] for row in rows] == [2, 1, 1, 1]
    assert all(row[blend(RIGHT, USUAL_PRIOR)] == 1.0 for row in rows)


def test_a_window_is_a_prompt_and_an_answer():
    """The last layer of a prompt as the router sees it from the layer before, with its gates."""
    assert prompt_tokens(Window([0] * 30, 12, "")) == 12
    assert prompt_tokens(Window([0] * 30, 1, "")) == 15
    window = Window([0] * 20, 10, "x")
    rng = np.random.default_rng(1)
    found = {(ROUTER_LOGITS, il): rng.random((20, 4)) for il in (3, 5)}
    found[ROUTER_INPUT, 3] = rng.random((20, 6))
    router = rng.random((4, 6))
    made = usage_of(found, window, [3, 5], router, 4, 1)
    first = np.bincount(found[ROUTER_LOGITS, 3][:10].argmax(axis=1), minlength=4)
    assert made.counts[0].tolist() == first.tolist()
    assert made.gates[0] == pytest.approx(made.counts[0])  # one expert has all of a token
    seen = (found[ROUTER_INPUT, 3][:10] @ router.T).argmax(axis=1)
    assert made.counts[1].tolist() == np.bincount(seen, minlength=4).tolist()
    answer = np.bincount(found[ROUTER_LOGITS, 5][10:].argmax(axis=1), minlength=4)
    assert made.answer[1].tolist() == answer.tolist()
    assert (made.n_prompt, made.n_answer, made.domain) == (10, 10, "x")
    two = usage_of(found, window, [3, 5], None, 4, 2)
    assert two.gates[0].sum() == pytest.approx(10) and two.counts[1].sum() == 20
