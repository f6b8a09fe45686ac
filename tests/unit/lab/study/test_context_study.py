"""How well a prompt predicts the experts of its answer, compared with counts by hand."""

import numpy as np
import pytest

from gguf_tools import synthetic
from gguf_tools.experts.hparams import SIGMOID, SOFTMAX
from orchestrator.lab.eval.text import Window
from orchestrator.lab.study.activations import (
    CHOSEN,
    GATES,
    ROUTER_INPUT,
    activations_of,
    applied_gates,
)
from orchestrator.lab.study.near_data import (
    COUNTS,
    EQUAL_USAGE,
    ORACLE,
    OWN,
    RIGHT,
    WRONG,
    Usage,
    blend,
    captured,
    choices,
    domain_rows,
    layer_rows,
    prompt_tokens,
    usage_of,
)


def usage(domain, prompt, answer):
    counts = np.array([prompt])
    return Usage(domain, counts, counts, np.array([answer]))


def test_uses_that_the_hot_experts_cover():
    scores, used = np.array([[0.1, 0.5, 0.4], [0.9, 0.1, 0.9]]), np.array([[5, 2, 3], [1, 7, 2]])
    assert captured(scores, used, 1) == 2 + 1  # equal scores are ordered by index
    assert captured(scores, used, 2) == 5 + 3


def test_each_profile_uses_its_own_texts():
    """ "Right" profiles use other texts of the same domain, "wrong" ones those of other domains.
    Each text has the same weight."""
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
    assert known[blend(RIGHT)] == pytest.approx(np.array([[(8 + 32) / 72, 32 / 72]]))
    assert choices(usages, 3, 1)[RIGHT] is None
    rows = {(row["domain"], row["by"]): row for row in domain_rows(usages, [known] * 4, 1)}
    assert rows["chat", EQUAL_USAGE]["mass"] == 0.5
    assert rows["chat", OWN]["mass"] == 1 / 40
    assert rows["documents", RIGHT]["mass"] == 0.75


def test_figure_4_is_a_cosine_of_usage():
    """Cosine similarity of the prompt's usage with the answer's (1, 0). P = (3/7, 4/7) gives 3/5. S
    is half P and half W = (0, 1)."""
    counts, gates = np.array([[3.0, 4.0]]), np.array([[0.0, 7.0]])
    one = Usage("", counts, gates, np.array([[5.0, 0.0]]))
    known = choices([one], 0, 1)
    assert known[COUNTS] == pytest.approx(np.array([[3 / 7, 4 / 7]]))
    assert known[OWN] == pytest.approx(np.array([[3 / 14, 11 / 14]]))
    (row,) = layer_rows([one], [known], [3])
    assert row[COUNTS] == pytest.approx(0.6)
    assert row[OWN] == pytest.approx(3 / np.hypot(3, 11))


def test_a_window_is_a_prompt_and_an_answer():
    """Experts and gate weights are the model's. For the last layer of a prompt they are predicted
    from the previous layer's router input, with the scores that the hook computes."""
    assert prompt_tokens(Window([0] * 30, 12, "")) == 12
    assert prompt_tokens(Window([0] * 30, 1, "")) == 15
    window = Window([0] * 20, 10, "x")
    rng = np.random.default_rng(1)
    chosen = {il: np.argsort(rng.random((20, 4)), axis=1)[:, :2] for il in (3, 5)}
    weights = {il: rng.random((20, 2)) for il in (3, 5)}
    found = {(CHOSEN, il): each for il, each in chosen.items()}
    found |= {(GATES[0], il): each for il, each in weights.items()}
    found[ROUTER_INPUT, 3] = rng.random((20, 6))
    router = rng.random((4, 6))

    def sums(ids, of):
        counts, gates = np.zeros(4), np.zeros(4)
        for token, weighs in zip(ids, of, strict=True):
            for expert, weight in zip(token, weighs, strict=True):
                counts[expert] += 1
                gates[expert] += weight
        return counts, gates

    for gating in (SOFTMAX, SIGMOID):
        made = usage_of(found, window, [3, 5], router, 4, gating)
        counts, gates = sums(chosen[3][:10], weights[3][:10])
        assert made.counts[0].tolist() == counts.tolist()
        assert made.gates[0] == pytest.approx(gates)
        ids, scores = [], []
        for x in found[ROUTER_INPUT, 3][:10]:
            logits = router @ x
            powers = np.exp(logits)
            score = powers / powers.sum() if gating == SOFTMAX else 1 / (1 + 1 / powers)
            best = sorted(range(4), key=lambda e: -logits[e])[:2]
            ids.append(best)
            scores.append(score[best])
        counts, gates = sums(ids, scores)
        assert made.counts[1].tolist() == counts.tolist()
        assert made.gates[1] == pytest.approx(gates)
        for layer, il in enumerate((3, 5)):
            answer = np.bincount(chosen[il][10:].ravel(), minlength=4)
            assert made.answer[layer].tolist() == answer.tolist()
        assert made.domain == "x"
    alone = usage_of(found, window, [3, 5], None, 4)
    assert alone.counts[1].tolist() == sums(chosen[5][:10], weights[5][:10])[0].tolist()


@pytest.mark.parametrize(
    ("shape", "renormalises"), [("tiny-olmoe", False), ("tiny-qwen3moe", True)]
)
def test_gate_weights_are_renormalised_as_in_the_family(library, tmp_path, shape, renormalises):
    path = synthetic.write(tmp_path / "m.gguf", shape)
    (found,) = activations_of(path, [range(16)], 1)
    gates = applied_gates(found, 1)
    logits = found["ffn_moe_logits", 1].astype(np.float64)
    scores = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    expected = np.take_along_axis(scores, found[CHOSEN, 1], axis=1)
    if renormalises:
        expected /= expected.sum(axis=1, keepdims=True)
    assert gates == pytest.approx(expected, rel=1e-4)
    assert (gates.sum(axis=1) < 0.999).all() == (not renormalises)
