"""A runtime with a tiny model: answers and how they end, evaluations, settings, failures."""

from contextlib import closing

import pytest
from answering import answered, evaluated, submitted
from tables import cases

from orchestrator.config import Config
from orchestrator.errors import ConfigError, NativeError
from orchestrator.runtime.answering import Answering
from orchestrator.runtime.load import Loader
from orchestrator.runtime.runtime import Runtime

N_CTX = 256  # llama.cpp's minimum


@pytest.fixture
def config(library, tiny_model):
    usual = {"policy": "plain", "ctx": N_CTX, "ubatch": 8, "threads": 1}
    return Config.build(model=tiny_model("mixtral", "q8_0"), **usual)


@pytest.fixture
def runtime(config):
    with Runtime.open(config, answering=Answering(grammars=True)) as opened:
        yield opened


@pytest.fixture
def e(config):
    with Runtime.open(config) as opened, opened.evaluator() as evaluator:
        yield evaluator


def tokens(runtime, data):
    """One token for each byte."""
    vocabulary = runtime.vocabulary
    of = {vocabulary.piece(token): token for token in range(vocabulary.n_vocab)}
    return [of[bytes([each])] for each in data]


def only(text):
    """Fields of a request with which the model answers this text and ends."""
    return {"grammar": f'root ::= "{text}"'}


def test_streams_whole_characters(runtime):
    said = "aé€😀z"
    with closing(submitted(runtime, [5, 6], 100, stream=True, **only(said))) as answer:
        events = list(answer)
    assert "".join(each["content"] for each in events) == said
    assert all("\ufffd" not in each["content"] for each in events)
    assert events[-1]["stop_type"] == "eos"
    assert events[-1]["timings"]["prompt_n"] == 2
    assert answer.costs()["hit_rate"] is None
    assert runtime.mode.startswith("llama.cpp's own path: everything fits")


def test_only_new_tokens_are_evaluated(runtime):
    """A prompt that continues the sequence evaluates its new tokens, and again its last token and
    the last token of the answer."""
    hello = tokens(runtime, b"hello")
    first = answered(runtime, hello, 3, ignore_eos=True)
    assert first["timings"]["prompt_n"] == 5
    for more, n_new in ((b" more", 1 + 5), (b" you", 3), (b" you", 1)):
        prompt = hello + first["tokens"] + tokens(runtime, more)
        assert evaluated(runtime, prompt, 3) == n_new


def test_long_prompts_go_in_batches(runtime):
    more = {"stream": True, "return_progress": True}
    with closing(submitted(runtime, list(range(3, 23)), 5, **more)) as answer:
        seen = [each["prompt_progress"] for each in answer if "prompt_progress" in each]
    assert {each["total"] for each in seen} == {20}
    done = [each["processed"] for each in seen]
    assert done == sorted(done) and done[-1] == 20 and len(done) >= 3


@cases(
    "n_prompt, max_tokens, n_said, is_full",
    (1, 3, 3, False),
    (N_CTX - 4, 100, 4, True),
)
def test_an_answer_ends_at_its_limit_or_the_context(runtime, n_prompt, max_tokens, n_said, is_full):
    found = answered(runtime, [9] * n_prompt, max_tokens, ignore_eos=True)
    assert (found["stop_type"], found["truncated"]) == ("limit", is_full)
    assert abs(found["tokens_predicted"] - n_said) <= is_full


def test_prompts_that_cannot_be_answered_are_refused(runtime):
    with pytest.raises(
        ConfigError, match=r"256: shorten the prompt, or increase the context with --ctx$"
    ):
        answered(runtime, [9] * N_CTX)
    with pytest.raises(ConfigError):
        answered(runtime, [9], grammar="root ::= (")
    assert answered(runtime, [9], 3, **only("z"))["content"] == "z"


def test_a_prompt_for_which_no_context_is_long_enough(config):
    longer = config.with_changes(ctx=10**6)
    with Runtime.open(longer, answering=Answering()) as runtime:
        n = runtime.about.n_ctx
        with pytest.raises(ConfigError, match=f"{n}: shorten the prompt: the model"):
            answered(runtime, [9] * n)


def test_closing_early_is_a_cancel(runtime):
    for _ in range(2):
        with closing(submitted(runtime, [5], 200, stream=True, ignore_eos=True)) as answer:
            next(iter(answer))
        assert answer.has_ended
    assert answered(runtime, tokens(runtime, b"next"), 3, **only("z"))["content"] == "z"


@cases("status, error, text", (1, ConfigError, "full"), (-3, NativeError, "evaluate"))
def test_failed_steps(e, monkeypatch, status, error, text):
    with monkeypatch.context() as patched:
        patched.setattr(e.inside.context, "decode", lambda *_args, **_more: status)
        with pytest.raises(error, match=text):
            e.eval([3, 4, 5], 0)
    assert e.n_cached == 0
    assert e.eval([3, 4, 5], 0).shape[0] == 1


def test_cancel_inside_a_step_leaves_the_sequence_whole(e, monkeypatch):
    def cancelled(*_args, **_more):
        e.cancel()
        return 2

    e.eval([3, 4, 5], 0)
    with monkeypatch.context() as patched:
        patched.setattr(e.inside.context, "decode", cancelled)
        with pytest.raises(NativeError, match="cancelled"):
            e.eval([6, 7], 3)
    assert e.n_cached == 3
    after = e.eval([6], 3)
    assert after == pytest.approx(e.eval([3, 4, 5, 6], 0), abs=1e-3)


def test_eval_returns_logits_at_a_position(e):
    assert e.eval(list(range(3, 13)), 0).shape == (1, e.inside.llama.n_vocab)
    after_four = e.eval([9], 4)
    assert after_four == pytest.approx(e.eval([3, 4, 5, 6, 9], 0), abs=1e-3)
    for more, pos in (([4], 7), ([4], -1), ([], 0)):
        with pytest.raises(ConfigError):
            e.eval(more, pos)
    with pytest.raises(ConfigError, match="without memory for every token's logits"):
        next(e.eval_each([4], 0))


def test_the_begin_token_appears_once(config):
    """The tokenizer adds the begin token, whether or not the template has it."""
    for template in ("<s>hi", "hi"):
        answering = Answering(chat_template=template)
        with Runtime.open(config, answering=answering) as runtime:
            plain = runtime.vocabulary.tokenize("hi", add_special=False, parse_special=False)
            body = b'{"messages": [{"role": "user", "content": ""}], "max_tokens": 1}'
            with closing(runtime.submit(body)) as answer:
                (found,) = answer
        assert found["usage"]["prompt_tokens"] == 1 + len(plain)


def test_retention_is_checked(runtime):
    with pytest.raises(ConfigError):
        runtime.set(retention=1.5)
    assert runtime.set(retention=0.5) is False  # llama.cpp's own path has no retention
    assert runtime.config.given("retention") == 0.5


def test_a_policy_that_cannot_start_changes_nothing(runtime, monkeypatch):
    mode, load = runtime.mode, Loader.load

    def fails(self, runs, *more):
        if runs.config.policy == "lru":
            raise NativeError("no store")
        return load(self, runs, *more)

    monkeypatch.setattr(Loader, "load", fails)
    with pytest.raises(ConfigError, match="belady"):
        runtime.set(policy="belady")
    with pytest.raises(NativeError, match="no store"):
        runtime.set(policy="lru")
    assert runtime.config.policy == "plain"
    assert runtime.mode.partition("(")[0] == mode.partition("(")[0]
    assert evaluated(runtime, [9, 8, 7], 3) == 3
