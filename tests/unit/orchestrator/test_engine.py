"""The engine over a tiny model, of which a test writes what is sampled: streaming, endings,
failures."""

from types import SimpleNamespace

import pytest
from answering import GREEDY
from orchestrator.runtime.engine import Engine
from tables import cases

from orchestrator.config import Config
from orchestrator.errors import ConfigError, NativeError
from orchestrator.runtime import engine as engine_module

N_CTX = 256  # the least that llama.cpp has
SCRIPT: list[int] = []  # what is sampled next
CHAIN = SimpleNamespace(sample=lambda: SCRIPT.pop(0), close=lambda: None)


@pytest.fixture
def engine(library, tiny_model, monkeypatch):
    monkeypatch.setattr(engine_module, "SamplerChain", lambda *_: CHAIN)
    usual = {"policy": "plain", "ctx": N_CTX, "ubatch": 8, "threads": 1}
    with Engine.open(Config.build(model=tiny_model("mixtral", "q8_0"), **usual)) as opened:
        yield opened


@pytest.fixture
def context(engine):
    return engine._loaded.context


def tokens(engine, data):
    """A token for each byte."""
    of = {engine.llama.piece(token): token for token in range(engine.llama.n_vocab)}
    return [of[bytes([each])] for each in data]


def script(engine, data):
    """What the model samples, to its end."""
    end = next(each for each in range(engine.llama.n_vocab) if engine.llama.is_end(each))
    SCRIPT[:] = [*tokens(engine, data), end]


def answer(engine, prompt, said=None, max_tokens=100):
    """said: what the model samples; else the script goes on."""
    if said is not None:
        script(engine, said)
    return "".join(engine.generate(tokens(engine, prompt), GREEDY, max_tokens))


def test_streams_whole_characters(engine):
    script(engine, "aé€😀z".encode())
    pieces = list(engine.generate([5, 6], GREEDY, 100))
    assert pieces == ["a", "é", "€", "😀", "z"]
    stats = engine.last_stats
    assert (stats.finish, stats.tokens, stats.prompt_tokens) == ("end", 11, 2)
    assert stats.hit_rate is None
    assert stats.mode.startswith("llama.cpp's own path: everything fits")
    assert answer(engine, b"p", b"a\xe2\x82") == "a\ufffd"  # a broken character at the end


def test_only_new_tokens_are_evaluated(engine):
    """The last token is, for its logits."""
    for prompt, n_new in (
        (b"hello", 5),
        (b"helloxyz more", 5),
        (b"hello you", 4),
        (b"hello you", 1),
    ):
        answer(engine, prompt, b"xyz")
        assert engine.last_stats.evaluated_tokens == n_new


def test_long_prompts_go_in_batches(engine):
    seen: list[tuple[int, int]] = []
    script(engine, b"")
    list(engine.generate(list(range(3, 23)), GREEDY, 5, lambda *at: seen.append(at)))
    assert seen == [(0, 20), (8, 20), (16, 20), (20, 20)]


@cases(
    "n_prompt, max_tokens, said, finish",
    (1, 3, "xxx", "length"),
    (N_CTX - 4, 100, "xxxxx", "context"),
)
def test_an_answer_that_is_cut(engine, n_prompt, max_tokens, said, finish):
    assert answer(engine, b"p" * n_prompt, b"x" * 200, max_tokens) == said
    assert (engine.last_stats.finish, engine.last_stats.tokens) == (finish, len(said))


@cases(
    "n_prompt, asked, advice",
    (0, N_CTX, "empty"),
    (N_CTX, N_CTX, "256: shorten it, or raise --ctx"),
    (N_CTX, 10**6, "made for no more"),
)
def test_impossible_prompts(engine, n_prompt, asked, advice):
    engine._steps._asked_ctx = asked
    with pytest.raises(ConfigError, match=advice):
        answer(engine, b"p" * n_prompt)


def test_cancel_between_tokens(engine):
    script(engine, b"abcdef")
    pieces = []
    for piece in engine.generate([5], GREEDY, 6):
        pieces.append(piece)
        if piece == "b":
            engine.cancel()
    assert pieces == ["a", "b"]
    assert engine.last_stats.finish == "cancelled"
    assert answer(engine, b"next", b"z") == "z"


def test_cancel_inside_a_step_leaves_the_cache_whole(engine, context, monkeypatch):

    def cancelled(*_args, **_more):
        engine.cancel()
        return 2

    answer(engine, b"hello", b"ab")
    with monkeypatch.context() as patched:
        patched.setattr(context, "decode", cancelled)
        assert answer(engine, b"helloabmore") == ""
    assert answer(engine, b"helloabmore", b"c") == "c"
    assert engine.last_stats.evaluated_tokens == len("more")


def test_closing_early_is_a_cancel(engine):
    script(engine, b"abc")
    stream = engine.generate([5], GREEDY, 3)
    next(stream)
    stream.close()
    assert (engine.last_stats.finish, engine.last_stats.tokens) == ("cancelled", 1)


@cases(
    "status, error, text",
    (1, ConfigError, "full"),
    (-3, NativeError, "evaluate"),
    (2, NativeError, "evaluate"),
)
def test_failed_steps(engine, context, monkeypatch, status, error, text):
    with monkeypatch.context() as patched:
        patched.setattr(context, "decode", lambda *_args, **_more: status)
        with pytest.raises(error, match=text):
            answer(engine, b"hello")
    assert answer(engine, b"hello", b"z") == "z"


def test_eval(engine):
    assert engine.eval(list(range(3, 13)), 0).shape == (1, engine.llama.n_vocab)
    behind_four = engine.eval([9], 4)
    assert behind_four == pytest.approx(engine.eval([3, 4, 5, 6, 9], 0), abs=1e-3)
    for more, pos in (([4], 7), ([4], -1), ([], 0)):
        with pytest.raises(ConfigError):
            engine.eval(more, pos)
    with pytest.raises(ConfigError, match="logits_all"):
        next(engine.eval_each([4], 0))


def test_begin_token_stands_once(engine):
    plain = engine.tokenize("hi", special=False)
    begun = engine.tokenize("hi")
    assert begun[1:] == plain and engine.llama.piece(begun[0], special=True) == b"<s>"
    for text in ("<s>hi", "hi"):
        engine._template.render = lambda messages, text=text: text
        assert engine.render_chat([]) == begun


def test_retention_is_checked(engine):
    with pytest.raises(ConfigError):
        engine.change("retention", 1.5)
    assert engine.change("retention", 0.5) is False  # the plain path: nothing to retain
    assert engine.config.given("retention") == 0.5


def test_a_policy_that_cannot_start_changes_nothing(engine, monkeypatch):
    mode, load = engine.mode, engine._loader.load

    def fails(runs, *_):
        if runs.config.policy == "lru":
            raise NativeError("no store")
        return load(runs)

    monkeypatch.setattr(engine._loader, "load", fails)
    with pytest.raises(ConfigError, match="belady"):
        engine.set_policy("belady")
    with pytest.raises(NativeError, match="no store"):
        engine.set_policy("lru")
    assert (engine.config.policy, engine.mode) == ("plain", mode)
    assert answer(engine, b"hello", b"z") == "z"
