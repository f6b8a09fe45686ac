"""Token importance (DyMoE eq. 1): the attention that each token of a prompt receives."""

import numpy as np
import pytest

from .conftest import opened

N = 48
TOKENS = np.random.default_rng(3).integers(0, 200, N).tolist()


def scores(model, parts, **settings):
    """Return layer -> importance [T] of the last part, after all parts are evaluated in order."""
    usual = {"policy": "dymoe", "low_tier": "skip", "expert_ram": 64 << 20, "prefetch": "off"}
    found = {}

    def note(event):
        score = event.importance_array
        found[event.layer] = None if score is None else score.copy()

    with opened(model, **usual, **settings) as runtime, runtime.evaluator() as e:
        e.inside.store.set_route(note)
        at = 0
        for part in parts:
            found.clear()
            if e.config.logits_all:
                assert sum(len(rows) for rows in e.eval_each(part, at)) == len(part)
            else:
                e.eval(part, at)
            at += len(part)
    return found


@pytest.mark.parametrize("shape", ["qwen3moe", "olmoe", "mixtral", "phimoe", "deepseek2"])
def test_a_window_of_all_queries_equals_the_exact_form(shape, tiny_model):
    """The two forms agree within 2 %.

    Flash attention and softmax round differently, more in deeper layers.
    """
    model = tiny_model(shape, "q4_k")
    exact = scores(model, [TOKENS], importance="exact")
    windowed = scores(model, [TOKENS], importance="window", importance_window=N)
    assert len(exact) > 1
    for layer, expected in exact.items():
        found = windowed[layer]
        np.testing.assert_allclose(found, expected, rtol=0.02, atol=0.02)
        if len(expected) == N:
            assert expected.sum() == pytest.approx(N, rel=1e-4)


@pytest.mark.parametrize("shape", ["qwen3moe", "mixtral", "deepseek2"])
@pytest.mark.parametrize("window", [8, 1])
def test_a_window_sums_the_attention_of_its_queries(shape, window, tiny_model):
    """The window's importance equals that of all queries minus that of the queries before it."""
    model, exact = tiny_model(shape, "q4_k"), {"importance": "exact", "logits_all": True}
    whole, before = scores(model, [TOKENS], **exact), scores(model, [TOKENS[:-window]], **exact)
    found = scores(model, [TOKENS], importance_window=window, logits_all=True)
    for layer, score in found.items():
        expected = whole[layer] - np.pad(before[layer], (0, window))
        # tokens differ by much more than the tolerance
        assert expected.std() > 0.1 * expected.mean()
        most = (0.3 if layer else 0.03) * expected.std()  # the two forms round differently
        np.testing.assert_allclose(score, expected, atol=most, rtol=0.02)


@pytest.mark.parametrize("shape", ["qwen3moe", "mixtral", "deepseek2"])
def test_importance_with_an_8_bit_kv_cache(shape, tiny_model):
    """Importance with a q8_0 KV cache: correlation above 0.99 with f16, sums within 0.1 %."""
    model = tiny_model(shape, "q4_k")
    asked = {"importance": "window", "importance_window": 8, "logits_all": True}
    usual, found = scores(model, [TOKENS], **asked), scores(model, [TOKENS], kv="q8_0", **asked)
    for layer, expected in usual.items():
        assert np.corrcoef(found[layer], expected)[0, 1] > 0.99
        assert found[layer].sum() == pytest.approx(expected.sum(), rel=1e-3)


def test_a_later_chunk_scores_its_own_tokens(one):
    """The importance of a later chunk equals that of its tokens in a single chunk.

    The last query's attention to a token does not depend on the token's chunk.
    """
    whole = scores(one, [TOKENS], importance_window=1)[0]
    parts = scores(one, [TOKENS[:19], TOKENS[19:]], importance_window=1)[0]
    assert parts.shape == (N - 19,)
    np.testing.assert_allclose(parts, whole[19:], rtol=1e-3, atol=1e-5)
    assert parts.sum() < 0.99


def test_a_last_layer_maps_its_output_rows(one):
    found = scores(one, [TOKENS], importance_window=4)
    last = found[max(found)]
    assert last.shape == (1,)
    all_tokens = scores(one, [TOKENS], importance_window=4, logits_all=True)[max(found)]
    assert all_tokens.shape == (N,)
    np.testing.assert_allclose(last[0], all_tokens[-1], rtol=1e-4)


@pytest.mark.parametrize("importance", ["window", "exact", "load"])
def test_no_importance_for_one_token_or_without_request(importance, one):
    single = scores(one, [TOKENS, [5]], importance=importance)
    assert set(single.values()) == {None}
    many = scores(one, [TOKENS], importance=importance)
    assert all((found is None) == (importance == "load") for found in many.values())


def test_logits_do_not_change(both):
    """Computing the importance does not change the logits, bit for bit."""
    options = {"policy": "dymoe", "low_tier": "skip", "retention": 1.0, "expert_ram": 64 << 20}
    found = []
    for importance in ("window", "load"):
        with opened(both, importance=importance, **options) as runtime, runtime.evaluator() as e:
            found.append(e.eval(TOKENS, 0))
    np.testing.assert_array_equal(*found)
