"""Several sequences in one context: each gets the same tokens as alone."""

import numpy as np
import pytest

from orchestrator.errors import ConfigError
from orchestrator.events import Phase

from . import conftest
from .conftest import drawn

N_DECODE = 10
PROMPTS = [drawn(6 + seed, seed) for seed in range(3)]
# A fixed placement, so that runs alone and together compute with the same experts.
DYNAEXQ = {"policy": "dynaexq", "update_steps": 0, "hot_experts": 3, "expert_ram": 64 << 20}
LRU = {"policy": "lru", "expert_ram": 1 << 20}
DYMOE = {"policy": "dymoe", "retention": 1.0, "expert_ram": 1 << 20}


def opened(model, **settings):
    usual = {"ctx": 1024, "ubatch": 64, "use_extra_bufts": False}
    return conftest.opened(model, **(usual | settings))


def alone(e, prompt):
    """Return (greedy tokens, logits [1 + N_DECODE, n_vocab]) after a prompt."""
    rows = conftest.greedy(e, prompt, N_DECODE)
    return rows[:-1].argmax(axis=1).tolist(), rows


@pytest.mark.parametrize("settings", [DYNAEXQ, LRU], ids=("dynaexq", "lru"))
@pytest.mark.parametrize("n", [1, 4, 32])
def test_equal_prompts_in_one_batch_give_equal_tokens(both, settings, n):
    with opened(both, **settings) as runtime, runtime.evaluator() as e:
        expected, rows = alone(e, PROMPTS[0])
    with opened(both, **settings, sequences=n) as runtime, runtime.evaluator() as e:
        first = e.eval(PROMPTS[0], 0)[-1]
        all_sequences = list(range(n))
        for sequence in all_sequences:
            e.fork(sequence)
        found = [[int(first.argmax())] * n]
        for at in range(N_DECODE):
            logits = e.decode_batch(found[-1], all_sequences)
            assert logits.shape == (n, len(first))
            np.testing.assert_array_equal(logits[1:], logits[:-1])
            # Flash attention sums the KV cells of a sequence in another order if other sequences'
            # cells are between them. Logits have a spread of 2.
            np.testing.assert_allclose(logits[0], rows[at + 1], atol=0 if n == 1 else 0.2)
            found.append(logits.argmax(axis=1).tolist())
        assert [[row[s] for row in found[:-1]] for s in all_sequences] == [expected] * n
        stats = e.inside.store.stats()
        if settings is DYNAEXQ:  # all experts are resident
            assert list(stats.demand_bytes) == list(stats.wait_us) == [0, 0]
            assert list(stats.hits) == list(stats.requests)
        e.inside.store.check()


@pytest.mark.parametrize("settings", [DYNAEXQ, LRU, DYMOE], ids=("dynaexq", "lru", "dymoe"))
def test_different_sequences_give_the_same_tokens_as_alone(both, settings):
    """Sequences of different lengths, one of which starts later, give the same tokens as alone.

    Each expert has one precision here. A batch sums in another order, so equally likely tokens
    could be swapped, but not with these prompts.
    """
    with opened(both, **settings) as runtime, runtime.evaluator() as e:
        expected = [alone(e, prompt)[0] for prompt in PROMPTS]
    with opened(both, **settings, sequences=3) as runtime, runtime.evaluator() as e:
        last = {}
        found = [[], [], []]

        def decode(order):
            rows = e.decode_batch([last[sequence] for sequence in order], order)
            for sequence, row in zip(order, rows, strict=True):
                found[sequence].append(last[sequence])
                last[sequence] = int(row.argmax())

        for number, prompt in enumerate(PROMPTS):
            last[number] = int(e.eval(prompt, 0)[-1].argmax())
            e.fork(number)
            decode(list(last))
        for _ in range(N_DECODE - 3):
            decode([2, 0, 1])
        assert all(each == expected[i][: len(each)] for i, each in enumerate(found))
        assert [len(each) for each in found] == [10, 9, 8]
        # the evaluator's own sequence is unchanged
        assert alone(e, PROMPTS[2])[0] == expected[2]


def test_predictions_of_all_sequences_are_prefetched(both):
    """A decode step prefetches the predicted experts of all its tokens, and computes no importance.

    The graph of a prompt with as many tokens is not reused.
    """
    two = {"retention": 0.5, "high_tier": "q4_k", "low_tier": "q2_k", "prefetch": "on"}
    options = {**two, "policy": "dymoe", "expert_ram": 64 << 20}
    with opened(both, sequences=4, ubatch=4, **options) as runtime, runtime.evaluator() as e:
        original = e.inside.driver.on_route
        seen = set()
        n_apart = 0

        def decided(event):
            nonlocal n_apart
            original(event)
            if event.n_tokens < 4:
                return
            seen.add((event.phase, bool(event.has_importance)))
            if event.phase == Phase.DECODE and event.n_ahead:
                wanted = set(event.ahead_ids_array[0].ravel().tolist())
                n_apart += len(wanted) > event.k
                out = e.inside.store.decision
                listed = list(out._prefetch[: out.n_prefetch])
                assert {key >> 16 & 0xFFFF for key in listed} == wanted
                assert {key & 0xFFFF for key in listed} == {event.layer + 1}

        e.inside.driver.set_route(decided)
        e.eval(PROMPTS[2][:4], 0)
        for sequence in range(4):
            e.fork(sequence)
        for step in range(4):
            e.decode_batch(drawn(4, step), range(4))
        e.inside.store.check()
    assert seen == {(Phase.PREFILL, True), (Phase.DECODE, False)}
    assert n_apart > 0


def test_a_full_context_is_refused_and_changes_nothing(both):
    with opened(both, **DYNAEXQ, ctx=256, sequences=2) as runtime, runtime.evaluator() as e:
        e.eval(PROMPTS[0], 0)
        e.fork(0)
        e.fork(1)
        free = e.n_ctx - len(PROMPTS[0])
        for _ in range(free // 2):
            e.decode_batch([1, 2], [0, 1])
        with pytest.raises(ConfigError, match="the context of 256 tokens is full"):
            e.decode_batch([1, 2], [0, 1])
        e.fork(1)  # frees the sequence's own tokens
        assert e.decode_batch([1, 2], [0, 1]).shape[0] == 2
        e.reset()
        assert e.decode_batch([5], [1]).shape[0] == 1


def test_invalid_batches_are_refused(both):
    with opened(both, **LRU, sequences=2) as runtime, runtime.evaluator() as e:
        for tokens, sequences, said in (
            ([], [], "one token for each"),
            ([1], [0, 1], "one token for each"),
            ([1, 2], [0, 0], "named twice"),
            ([1], [2], "no sequence 2"),
            ([1], [-1], "no sequence -1"),
        ):
            with pytest.raises(ConfigError, match=said):
                e.decode_batch(tokens, sequences)
