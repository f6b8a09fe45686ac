"""Models whose memory cannot be cut go back to marks, so that no prompt is read twice either."""

import json
from contextlib import closing, contextmanager

import numpy as np
import pytest
from answering import evaluated, first_logits
from orchestrator.serve.backend import Backend
from served import server_library

from orchestrator.config import Config
from orchestrator.serve.settings import ServeSettings

DRAWN = np.random.default_rng(3).integers(60, 300, (5, 100)).tolist()
FIRST, OTHER, QUESTION, ANOTHER, SYSTEM = DRAWN
RECURRENT = ("qwen3-next", "qwen3.5-moe")
MIB = 2**20


def open_engine(made, **settings):
    usual = {"policy": "lru", "high_tier": "f16", "expert_ram": MIB, "cache_ram": 16 * MIB}
    return Engine.open(Config.build(model=made.packed, ctx=512, threads=1, **{**usual, **settings}))


@pytest.mark.parametrize("name", [*RECURRENT, "gpt-oss"])
def test_turns_and_other_conversations(name, case):
    with open_engine(case(name)) as engine:
        assert engine._steps.state.has_part
        assert engine._steps.state.recurrent == (name in RECURRENT)
        evaluated(engine, FIRST)
        first = list(engine._steps.cached)
        second = first + QUESTION[:30]
        assert evaluated(engine, second) == 30
        assert evaluated(engine, second) == 1
        assert evaluated(engine, first + ANOTHER[:20]) == 20  # an edited last message
        assert evaluated(engine, OTHER) == 100
        assert evaluated(engine, first + ANOTHER[:20] + [70]) <= 2  # the mark is before the last
        assert evaluated(engine, second) <= 30  # from the mark behind the first answer
        assert engine._shelf.used_bytes <= engine.plan.prompt_bytes


@pytest.mark.parametrize("name", [*RECURRENT, "gpt-oss"])
def test_going_back_gives_the_logits_of_a_straight_way(name, case, tmp_path):
    made = case(name)
    with open_engine(made) as engine:
        evaluated(engine, FIRST)
        prompt = list(engine._steps.cached) + QUESTION[:30]
        expected = first_logits(engine, prompt)
    with open_engine(made, prompt_cache=tmp_path) as engine:
        evaluated(engine, FIRST)
        evaluated(engine, prompt[:-30] + ANOTHER)
        evaluated(engine, OTHER)
        assert np.array_equal(first_logits(engine, prompt), expected)
        assert engine.last_stats.evaluated_tokens == 30
    with open_engine(made, prompt_cache=tmp_path) as engine:
        assert np.array_equal(first_logits(engine, prompt), expected)
        assert engine.last_stats.evaluated_tokens <= 30


@pytest.mark.parametrize("name", [*RECURRENT, "gpt-oss"])
def test_a_server_step_that_failed_changes_no_later_answer(name, case, monkeypatch):
    """A recurrent memory cannot drop the failed tokens: it returns to a checkpoint or restarts."""
    long = FIRST + QUESTION + ANOTHER

    def answer(backend, tokens):
        asked = {"prompt": tokens, "n_predict": 6, "temperature": 0, "return_tokens": True}
        body = json.dumps({**asked, "ignore_eos": True}).encode()
        status, text = backend.request("/completion", body, [0]).whole()
        return status, json.loads(text)

    usual = {"policy": "dymoe", "expert_ram": MIB, "cache_ram": 16 * MIB, "ubatch": 64}
    config = Config.build(model=case(name).packed, ctx=512, threads=1, **usual)
    answers = []
    for fails in (False, True):
        with closing(
            Backend(config, ServeSettings(), server_library(), lambda *_: None)
        ) as backend:
            backend.attend()
            assert answer(backend, FIRST)[0] == 200
            if fails:
                calls = iter(
                    [None] * backend.engine.model.n_layers
                )  # the first micro-batch is good

                def failing(*_, calls=calls, decide=backend.engine.policy.decide):
                    next(calls)
                    decide(*_)

                with monkeypatch.context() as patched:
                    patched.setattr(backend.engine.policy, "decide", failing)
                    assert answer(backend, long)[0] == 500
            status, body = answer(backend, long)
            assert status == 200
            answers.append(body["tokens"])
    assert answers[0] == answers[1]


def test_a_beginning_that_several_share_is_marked(case):
    with open_engine(case("qwen3-next")) as engine:
        assert evaluated(engine, SYSTEM + FIRST) == 200
        assert evaluated(engine, SYSTEM + OTHER) == 200  # nobody knew where they go apart
        assert evaluated(engine, SYSTEM + QUESTION) == 100


def test_without_memory_for_marks_all_is_read_again(case):
    with open_engine(case("qwen3-next"), cache_ram=None) as engine:
        evaluated(engine, FIRST)
        assert evaluated(engine, FIRST) == 100
        assert engine._steps.marks == []


@pytest.mark.parametrize("name", [*RECURRENT, "gpt-oss", "llama4"])
def test_a_server_goes_on_behind_what_it_kept_at_its_end(name, case, tmp_path):
    """What it keeps is the end of an answer. A short prompt is written at its own end alone."""

    def answers(*prompts, **settings):
        """(tokens that were read of the last prompt; its answer's tokens, and how likely)."""
        usual = {"policy": "lru", "high_tier": "f16", "expert_ram": MIB, "cache_ram": 0}
        config = Config.build(model=case(name).packed, ctx=512, threads=1, **usual, **settings)
        with closing(Backend(config, ServeSettings(), server_library(), lambda *_: None)) as made:
            made.attend()
            for prompt in prompts:
                asked = {"prompt": prompt, "n_predict": 4, "temperature": 0, "return_tokens": True}
                body = json.dumps({**asked, "ignore_eos": True, "n_probs": 1}).encode()
                status, text = made.request("/completion", body, [0]).whole()
                made.answered([0], status == 200)
                answer = json.loads(text)
        likely = [each["logprob"] for each in answer["completion_probabilities"]]
        return answer["timings"]["prompt_n"], answer["tokens"], likely

    n_read, said, _ = answers(FIRST, prompt_cache=tmp_path)
    assert n_read == 100 and len(list(tmp_path.iterdir())) == 1
    edited, then = FIRST[:60] + ANOTHER, FIRST + said + QUESTION[:30]
    assert answers(edited, prompt_cache=tmp_path)[1] == answers(edited)[1]
    expected = answers(FIRST, then)
    found = answers(then, prompt_cache=tmp_path)
    assert found[:2] == (31, expected[1])
    # Without a restart llama.cpp reads such a prompt anew where a chunk has all of it.
    assert found == expected or name == "llama4"


@contextmanager
def serving(made, **settings):
    """A server on a family's model; what it yields asks it with tokens, and returns how many it
    read and those of its answer."""
    usual = {"policy": "lru", "high_tier": "f16", "expert_ram": MIB, "cache_ram": 16 * MIB}
    config = Config.build(model=made.packed, ctx=512, threads=1, **{**usual, **settings})
    with closing(Backend(config, ServeSettings(), server_library(), lambda *_: None)) as backend:
        backend.attend()

        def ask(prompt, **data):
            wanted = {"prompt": prompt, "n_predict": 4, "temperature": 0, "return_tokens": True}
            body = json.dumps({**wanted, "ignore_eos": True, **data}).encode()
            status, text = backend.request("/completion", body, [0]).whole()
            backend.answered([0], status == 200)
            answer = json.loads(text)
            return answer["timings"]["prompt_n"], answer["tokens"]

        ask.native = backend._native
        yield ask


@pytest.mark.parametrize("name", [*RECURRENT, "gpt-oss"])
def test_checkpoints_are_kept_in_a_file(name, case, tmp_path):
    """An edited last message after a restart: read from the end of the answer before it."""
    with serving(case(name)) as ask:
        first = FIRST + ask(FIRST)[1]
        ask(first + QUESTION[:30])
        expected = ask(first + ANOTHER)
        assert expected[0] <= 102
    with serving(case(name), prompt_cache=tmp_path) as ask:
        assert ask(FIRST)[1] == first[100:]
        ask(first + QUESTION[:30])
        assert ask.native.reusable(0, first + ANOTHER) == len(first) + 100 - expected[0]
    (path,) = tmp_path.iterdir()
    with serving(case(name), prompt_cache=tmp_path) as ask:
        n_read, said = ask(first + ANOTHER)
        # Memory with windows can be cut where its keys are still there; a file lacks older ones.
        assert said == expected[1] and n_read <= expected[0] + 2 * (name == "gpt-oss")
    with serving(case(name), prompt_cache=tmp_path, cache_ram=0) as ask:  # no checkpoint is used
        assert ask(first + ANOTHER[:50])[0] == len(first) + 50
        assert path.exists()


@pytest.mark.parametrize("name", [*RECURRENT, "gpt-oss"])
def test_marks_of_earlier_files_are_used(name, case, tmp_path):
    """They do not say which positions they cover."""
    with open_engine(case(name), prompt_cache=tmp_path) as engine:
        evaluated(engine, FIRST)
        first = list(engine._steps.cached)
        evaluated(engine, first + QUESTION[:30])
    (path,) = tmp_path.iterdir()
    assert b"positions" not in path.read_bytes()
    with serving(case(name)) as ask:
        fresh = ask(first + ANOTHER)
        assert fresh[0] == len(first) + 100
    with serving(case(name), prompt_cache=tmp_path) as ask:
        n_read, said = ask(first + ANOTHER)
        assert n_read <= 102 and said == fresh[1]


@pytest.mark.parametrize("name", [*RECURRENT, "gpt-oss"])
def test_an_answer_that_is_taken_out_costs_nothing_before_it(name, case):
    """As templates do that leave out the reasoning of earlier answers."""
    with serving(case(name)) as ask:
        ask(FIRST, n_predict=40)
        assert ask(FIRST + ANOTHER[:20])[0] <= 21
        assert ask(FIRST + ANOTHER[:20])[0] <= 5  # the same again
