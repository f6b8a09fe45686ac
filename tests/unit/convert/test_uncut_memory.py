"""Models whose memory of a sequence cannot be cut (recurrent or sliding window) return to
checkpoints, so prompts are not read twice."""

import hashlib
import json
from contextlib import contextmanager

import numpy as np
import pytest
from answering import answered

from orchestrator.config import Config
from orchestrator.errors import NativeError
from orchestrator.runtime import prompt_copies
from orchestrator.runtime.answering import Answering
from orchestrator.runtime.runtime import Runtime

DRAWN = np.random.default_rng(3).integers(60, 300, (5, 100)).tolist()
FIRST, OTHER, QUESTION, ANOTHER, SYSTEM = DRAWN
RECURRENT = ("qwen3-next", "qwen3.5-moe")
UNCUT = pytest.mark.parametrize("name", [*RECURRENT, "gpt-oss"])
MIB = 2**20


@contextmanager
def serving(made, **settings):
    """A runtime with a family's model. Yields a function that answers a prompt of tokens and
    returns (number of tokens read, tokens of the answer)."""
    usual = {"policy": "lru", "high_tier": "f16", "expert_ram": MIB, "cache_ram": 16 * MIB}
    config = Config.build(model=made.packed, ctx=512, threads=1, **{**usual, **settings})
    with Runtime.open(config, answering=Answering()) as runtime:

        def ask(prompt, **data):
            found = answered(runtime, prompt, **{"n": 4, "ignore_eos": True, **data})
            return found["timings"]["prompt_n"], found["tokens"]

        ask.runtime = runtime
        yield ask


@UNCUT
def test_each_turn_reads_only_its_new_tokens(name, case):
    with serving(case(name)) as ask:
        first = FIRST + ask(FIRST)[1]
        assert ask(first + QUESTION[:30])[0] == 31  # the last token of an answer was not evaluated
        assert ask(first + QUESTION[:30])[0] <= 5  # the same request again
        assert ask(first + ANOTHER[:20])[0] <= 22  # an edited last message
        assert ask(OTHER)[0] == 100
        assert ask(first + ANOTHER[:20])[0] <= 5
        assert ask(first + QUESTION[:30])[0] <= 32


@UNCUT
def test_returning_to_a_checkpoint_does_not_change_the_answer(name, case, tmp_path):
    def likely(ask, prompt):
        found = answered(ask.runtime, prompt, 4, ignore_eos=True, n_probs=1)
        shown = [each["logprob"] for each in found["completion_probabilities"]]
        return found["tokens"], shown[-3:]

    with serving(case(name)) as ask:
        prompt = FIRST + ask(FIRST)[1] + QUESTION[:30]
        expected = likely(ask, prompt)
    with serving(case(name), prompt_cache=tmp_path) as ask:
        for other in (FIRST, prompt[:-30] + ANOTHER, OTHER):
            ask(other)
        tokens, shown = likely(ask, prompt)
        assert tokens == expected[0]
        # Micro-batches of other sizes round differently.
        assert shown == pytest.approx(expected[1], abs=0.01)


@UNCUT
def test_a_failed_step_changes_no_later_answer(name, case, monkeypatch):
    """A recurrent memory cannot drop the failed tokens. It returns to a checkpoint or restarts."""
    long, answers = FIRST + QUESTION + ANOTHER, []
    for fails in (False, True):
        with serving(case(name), policy="dymoe", ubatch=64) as ask:
            ask(FIRST)
            inside = ask.runtime.inside
            if fails:
                calls = iter([None] * inside.model.n_layers)  # only the first micro-batch succeeds

                def failing(*_, calls=calls, decide=inside.policy.decide):
                    next(calls)
                    decide(*_)

                with monkeypatch.context() as patched:
                    patched.setattr(inside.policy, "decide", failing)
                    with pytest.raises(NativeError, match="StopIteration"):
                        ask(long)
            answers.append(ask(long)[1])
    assert answers[0] == answers[1]


def test_without_memory_for_checkpoints_all_is_read_again(case):
    with serving(case("qwen3-next"), cache_ram=0) as ask:
        ask(FIRST)
        assert ask(FIRST)[0] == 100


@pytest.mark.parametrize("name", [*RECURRENT, "gpt-oss", "llama4"])
def test_a_conversation_goes_on_after_a_restart(name, case, tmp_path):
    """After a restart, only the new tokens are read, and the answer is the same. The file of a
    short prompt is written only at the end of the run."""

    def answers(*prompts, **settings):
        """(number of tokens read for the last prompt, tokens of its answer, their
        log-probabilities)"""
        with serving(case(name), cache_ram=0, **settings) as ask:
            for prompt in prompts:
                found = answered(ask.runtime, prompt, 4, ignore_eos=True, n_probs=1)
        likely = [each["logprob"] for each in found["completion_probabilities"]]
        return found["timings"]["prompt_n"], found["tokens"], likely

    n_read, said, _ = answers(FIRST, prompt_cache=tmp_path)
    assert n_read == 100 and len(list(tmp_path.iterdir())) == 1
    edited, then = FIRST[:60] + ANOTHER, FIRST + said + QUESTION[:30]
    assert answers(edited, prompt_cache=tmp_path)[1] == answers(edited)[1]
    expected = answers(FIRST, then)
    found = answers(then, prompt_cache=tmp_path)
    assert found[:2] == (31, expected[1])
    # Without a restart, llama.cpp reads such a prompt again if one attention chunk contains all of
    # it.
    assert found == expected or name == "llama4"


@UNCUT
def test_checkpoints_are_kept_in_a_file(name, case, tmp_path):
    """After a restart with an edited last message, reading starts at the end of the previous
    answer."""
    with serving(case(name)) as ask:
        first = FIRST + ask(FIRST)[1]
        ask(first + QUESTION[:30])
        expected = ask(first + ANOTHER)
        assert expected[0] <= 102
    with serving(case(name), prompt_cache=tmp_path) as ask:
        assert ask(FIRST)[1] == first[100:]
        ask(first + QUESTION[:30])
        assert ask.runtime._core.reusable(0, first + ANOTHER) == len(first) + 100 - expected[0]
    (path,) = tmp_path.iterdir()
    with serving(case(name), prompt_cache=tmp_path) as ask:
        n_read, said = ask(first + ANOTHER)
        # Memory with a sliding window can be cut only at positions whose keys still exist. A file
        # lacks older keys.
        assert said == expected[1] and n_read <= expected[0] + 2 * (name == "gpt-oss")
    # without memory for checkpoints
    with serving(case(name), prompt_cache=tmp_path, cache_ram=0) as ask:
        assert ask(first + ANOTHER[:50])[0] == len(first) + 50
        assert path.exists()


def without_positions(path):
    """Rewrite a file in the first format, whose marks do not name the positions that they cover."""
    data, footer = path.read_bytes(), prompt_copies._FOOTER
    state_end, n, _, magic = footer.unpack(data[-footer.size :])
    end = len(data) - footer.size
    description = json.loads(data[end - n : end])
    del description["positions"]
    written = json.dumps(description).encode()
    body = data[: end - n] + written
    digest = hashlib.sha256(repr((state_end, len(written))).encode() + body).digest()
    path.write_bytes(body + footer.pack(state_end, len(written), digest, magic))


@UNCUT
def test_marks_of_earlier_files_are_used(name, case, tmp_path):
    """Files of the first format are used although their marks do not say which positions they
    cover."""
    with serving(case(name), prompt_cache=tmp_path) as ask:
        first = FIRST + ask(FIRST)[1]
        ask(first + QUESTION[:30])
    (path,) = tmp_path.iterdir()
    without_positions(path)
    assert b"positions" not in path.read_bytes()
    with serving(case(name)) as ask:
        fresh = ask(first + ANOTHER)
        assert fresh[0] == len(first) + 100
    with serving(case(name), prompt_cache=tmp_path) as ask:
        n_read, said = ask(first + ANOTHER)
        assert n_read <= 102 and said == fresh[1]


@UNCUT
def test_removing_an_answer_keeps_the_prompt_before_it(name, case):
    """If an answer is removed, as by chat templates that leave out earlier reasoning, the prompt
    before it is not read again."""
    with serving(case(name)) as ask:
        ask(FIRST, n_predict=40)
        assert ask(FIRST + ANOTHER[:20])[0] <= 21
        assert ask(FIRST + ANOTHER[:20])[0] <= 5  # the same request again
