"""A runtime lends its context to one evaluation at a time, between answers."""

import json
import threading
from contextlib import closing

import numpy as np
import pytest
from answering import answered, submitted
from tables import cases

from orchestrator.errors import ConfigError, NativeError
from orchestrator.events import Phase
from orchestrator.runtime.answering import Answering
from orchestrator.runtime.runtime import Runtime

from .conftest import build, drawn, until

PROMPT, OTHER = drawn(40, 1), drawn(30, 2)
POLICIES = {
    "plain": {"policy": "plain"},
    "lru": {"policy": "lru", "expert_ram": 2 << 20},
    "dymoe": {"policy": "dymoe", "retention": 0.5, "exact_tiers": True},
    "context": {"policy": "context", "hot_experts": 2, "exact_tiers": True},
}
LONG = {"ignore_eos": True}


@pytest.fixture(params=POLICIES)
def config(request, both):
    return build(both, ubatch=16, use_extra_bufts=False, **POLICIES[request.param])


def opened(config, parallel=1):
    return Runtime.open(config, answering=Answering(parallel=parallel, reads_ahead=False))


def rows(e):
    """Logits of a prompt and of one token after it."""
    return np.concatenate([e.eval(OTHER, 0), e.eval([7], len(OTHER))])


def test_evaluations_between_answers_change_no_result(config):
    """Sequences are empty before and after an evaluation, and answers stay the same."""
    with Runtime.open(config) as runtime, runtime.evaluator() as e:
        expected_rows = rows(e)
    with opened(config) as runtime:
        expected = answered(runtime, PROMPT, 6, **LONG)
        n_read = expected["timings"]["prompt_n"]
        for _ in range(2):
            with runtime.evaluator() as e:
                assert e.n_cached == 0
                found = rows(e)
                assert e.n_cached == len(OTHER) + 1
            if config.policy in ("plain", "lru"):  # other policies learn from the evaluation
                np.testing.assert_array_equal(found, expected_rows)
            again = answered(runtime, PROMPT, 6, **LONG)
            if config.policy != "context":
                assert again["tokens"] == expected["tokens"]
            assert again["timings"]["prompt_n"] == n_read == len(PROMPT)
            assert again["timings"]["cache_n"] == 0


def test_an_answer_waits_for_the_end_of_an_evaluation(config):
    with opened(config) as runtime:
        alone = answered(runtime, PROMPT, 6, **LONG)["tokens"]
        with runtime.evaluator() as e:
            answer = submitted(runtime, PROMPT, 6, **LONG)
            first = e.eval(OTHER, 0)
            for _ in range(8):
                found = e.eval(OTHER, 0)
            if config.policy in ("plain", "lru"):
                np.testing.assert_array_equal(found, first)
            assert not answer.has_ended and answer.take() == (b"", False)
        with closing(answer):
            (said,) = answer
        assert len(said["tokens"]) == 6
        if config.policy in ("plain", "lru"):
            assert said["tokens"] == alone


def test_a_waiting_answer_can_be_cancelled(config):
    """A waiting answer can be cancelled while the evaluation continues."""
    with opened(config) as runtime:
        with runtime.evaluator() as e:
            with closing(submitted(runtime, PROMPT, 6, **LONG)) as answer:
                rows(e)
            assert answer.has_ended and answer.status == 0
            rows(e)
        assert len(answered(runtime, PROMPT, 6, **LONG)["tokens"]) == 6


def test_an_evaluation_waits_for_the_end_of_an_answer(config):
    with opened(config) as runtime:
        alone = answered(runtime, PROMPT, 40, **LONG)["content"]
        with runtime.evaluator():
            pass
        with closing(submitted(runtime, PROMPT, 40, stream=True, **LONG)) as answer:
            events = iter(answer)
            said = [next(events)]
            with runtime.evaluator() as e:
                until(lambda: answer.has_ended)
                rows(e)
            said += events
        assert said[-1]["tokens_predicted"] == 40
        if config.policy in ("plain", "lru"):
            assert "".join(each["content"] for each in said) == alone


def test_a_second_evaluation_waits(config):
    """A second evaluation waits for the first, on every thread."""
    with opened(config) as runtime:
        inside, seen = threading.Event(), []

        def evaluate():
            inside.set()
            with runtime.evaluator() as e:
                seen.append("second")
                rows(e)

        with runtime.evaluator() as e:
            thread = threading.Thread(target=evaluate)
            thread.start()
            inside.wait()
            rows(e)
            seen.append("first")
        thread.join()
        assert seen == ["first", "second"]


def test_an_evaluation_leaves_phases_and_counters(both):
    """After an evaluation, each token's phase follows from its batch again.

    An answer's costs count only its own steps.
    """
    config = build(both, ubatch=16, policy="lru", expert_ram=64 << 20)
    with opened(config) as runtime:
        answered(runtime, PROMPT, 6, **LONG)
        with runtime.evaluator():
            pass
        before = answered(runtime, PROMPT, 6, **LONG)["costs"]
        with runtime.evaluator() as e:
            rows(e)  # this ends with a token of an answer
            e.eval(OTHER, 0, phase=None)
        phases = []
        driver, store = runtime.inside.driver, runtime.inside.store

        def route(event):
            if event.layer == 0:
                phases.append((Phase(event.phase), event.n_tokens))
            driver.on_route_unasked(event)

        store.set_route(route)
        after = answered(runtime, PROMPT, 6, **LONG)["costs"]
        prompt = [(Phase.PREFILL, n) for n in (16, 16, 8)]
        assert phases == prompt + 5 * [(Phase.DECODE, 1)]
        for name in ("hit_rate", "prefill_hit_rate", "bytes_read", "mix", "computed"):
            assert after[name] == before[name], name


def test_a_failed_evaluation_leaves_the_runtime_usable(config):
    with opened(config) as runtime:
        expected = answered(runtime, PROMPT, 6, **LONG)["tokens"]
        with runtime.evaluator() as e, pytest.raises(ConfigError):
            e.eval([1], 5)
        with pytest.raises(ZeroDivisionError), runtime.evaluator() as e:
            e.eval(OTHER, 0)
            1 / 0  # noqa: B018
        found = answered(runtime, PROMPT, 6, **LONG)
        assert config.policy not in ("plain", "lru") or found["tokens"] == expected


def test_a_cancelled_evaluation_does_not_cancel_the_next_answer(config):
    """An evaluation after a cancelled answer computes normally, and vice versa."""
    with opened(config) as runtime:
        with runtime.evaluator() as e:
            e.cancel()
        assert len(answered(runtime, PROMPT, 6, **LONG)["tokens"]) == 6
        with closing(submitted(runtime, PROMPT, 200, stream=True, **LONG)) as answer:
            next(iter(answer))
            answer.cancel()
        with runtime.evaluator() as e:
            assert np.isfinite(rows(e)).all()


def test_an_evaluation_empties_all_sequences(both):
    """An evaluation empties the sequences of two concurrent answers."""
    config = build(both, ubatch=16, policy="lru", ctx=512)
    with opened(config, parallel=2) as runtime:
        body = {"prompt": PROMPT, "n_predict": 6, "temperature": 0, "return_tokens": True, **LONG}
        data = json.dumps(body).encode()

        def both_at_once():
            running = [runtime.submit(data, "/completion", (each,)) for each in (0, 1)]
            found = []
            for each in running:
                with closing(each):
                    found.append(next(iter(each)))
            return [each["tokens"] for each in found], [each["timings"] for each in found]

        tokens, _ = both_at_once()
        with runtime.evaluator() as e:
            rows(e)
            e.fork(0)
            e.decode_batch([5], [0])
        again, timings = both_at_once()
        assert again == tokens
        assert [each["prompt_n"] for each in timings] == [len(PROMPT)] * 2


def test_without_answering_only_evaluations_work(both):
    with Runtime.open(build(both, policy="plain")) as runtime:
        with pytest.raises(NativeError, match="loaded for evaluation"):
            runtime.submit(b"{}")
        with runtime.evaluator() as e:
            assert e.eval(OTHER, 0).shape[0] == 1


def test_settings_wait_for_an_evaluation(both):
    """A change that reloads the model waits for the evaluation.

    A live setting takes effect at once.
    """
    with opened(build(both, policy="dymoe", retention=0.5)) as runtime:
        changed = []
        with runtime.evaluator() as e:
            thread = threading.Thread(target=lambda: changed.append(runtime.set(policy="lru")))
            thread.start()
            assert runtime.set(retention=0.9)
            rows(e)
            assert not changed and e.inside.policy.name == "dymoe"
        thread.join()
        assert changed == [True] and runtime.inside.policy.name == "lru"
        until(lambda: not thread.is_alive())
        assert len(answered(runtime, PROMPT, 6, **LONG)["tokens"]) == 6


@cases(
    "what",
    lambda runtime: runtime.set(policy="lru"),
    lambda runtime: runtime.evaluator().__enter__(),
)
def test_a_thread_that_evaluates_does_not_wait_for_itself(both, what):
    with opened(build(both, policy="dymoe", retention=0.5)) as runtime:
        with runtime.evaluator() as e:
            with pytest.raises(NativeError, match="leave the `with` block"):
                what(runtime)
            assert rows(e).shape[0] == 2
        assert len(answered(runtime, PROMPT, 6, **LONG)["tokens"]) == 6
