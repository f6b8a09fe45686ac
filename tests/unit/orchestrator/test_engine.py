"""The engine over a scripted model: streaming, the cache's prefix, endings, failures."""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from tables import cases

from orchestrator.config import Config
from orchestrator.cost import planner as planner_module
from orchestrator.engine import engine as engine_module
from orchestrator.engine import llama_parts as parts_module
from orchestrator.engine import load as load_module
from orchestrator.engine.engine import Engine, Sampling
from orchestrator.errors import ConfigError, NativeError
from orchestrator.memory.machine import Machine, Probe

END = 0
GREEDY = Sampling(temp=0.0)


def no_store():
    raise NativeError("no store in this test")


API = SimpleNamespace(llama_supports_gpu_offload=lambda: False)
BINDINGS = SimpleNamespace(api=API, complaint=lambda: " (scripted)", library=no_store)


def fake_model(*_args, progress, **_kw):
    """Token t > 0 is the byte t; END ends."""
    if progress is not None:
        progress(1.0)
    return SimpleNamespace(
        handle=1,
        n_vocab=256,
        tokenize=lambda text, add_special, parse_special: [1] * add_special + [*text.encode()],
        piece=lambda token, special=False: bytes([token]),
        is_end=lambda token: token == END,
        adds_bos=lambda: True,
        bos=lambda: "<s>",
        eos=lambda: "</s>",
        chat_template=lambda: None,
        close=lambda: None,
    )


class FakeContext:
    """Remembers what it was asked to decode; before_decode may play a part."""

    def __init__(self, *_args, n_ctx, n_ubatch, **_kw):
        self.n_ctx, self.n_ubatch = n_ctx, n_ubatch
        self.kept: list[int] = []
        self.calls: list[tuple[list[int], int]] = []
        self.before_decode: Callable[[], int] = lambda: 0
        self.can_cut = True

    def decode(self, tokens, pos, all_logits, interruptible):
        assert len(tokens) <= self.n_ubatch
        assert pos == len(self.kept)
        status = self.before_decode()
        if status == 0:
            self.calls.append((list(tokens), pos))
            self.kept += tokens
            self.rows = len(tokens) if all_logits else 1
        return status

    def logits(self, n_outputs=1):
        return np.full((n_outputs, 256), len(self.kept), np.float32)

    def forget_from(self, pos):
        if self.can_cut or pos == len(self.kept):
            del self.kept[pos:]
            return True
        return False

    def forget_all(self):
        self.kept.clear()

    def close(self):
        pass


SCRIPT: list[int] = []  # what is sampled next
CHAIN = SimpleNamespace(sample=lambda: SCRIPT.pop(0), close=lambda: None)


@pytest.fixture
def path(tiny_model):
    return tiny_model("qwen3moe", "q8_0", "q4_k", "q2_k")


@pytest.fixture
def engine(path, monkeypatch):
    for of, name, fake in (
        (planner_module, "Bindings", SimpleNamespace(load=lambda: BINDINGS)),
        (planner_module, "probe", lambda _device: Machine(2**34)),
        (parts_module, "Model", fake_model),
        (parts_module, "LlamaContext", FakeContext),
        (engine_module, "SamplerChain", lambda *_: CHAIN),
        (Probe, "_measured", lambda *_: None),
        (load_module.Loader, "_checked", lambda _self, _plan: nullcontext()),
    ):
        monkeypatch.setattr(of, name, fake)
    config = Config.build(model=path, policy="plain", ctx=64, ubatch=8, threads=1)
    with Engine.open(config) as opened:
        yield opened


@pytest.fixture
def context(engine):
    return engine._loaded.context


def script(text, *more):
    SCRIPT[:] = [*text, *more]


def answer(engine, prompt, said=None, max_tokens=100):
    """said: what the model samples, to its end; else the script goes on."""
    if said is not None:
        script(said, END)
    return "".join(engine.generate(list(prompt), GREEDY, max_tokens))


def test_streams_whole_characters(engine):
    script("aé€😀z".encode(), END)
    pieces = list(engine.generate([5, 6], GREEDY, 100))
    assert pieces == ["a", "é", "€", "😀", "z"]
    stats = engine.last_stats
    assert (stats.finish, stats.tokens, stats.prompt_tokens) == ("end", 11, 2)
    assert stats.hit_rate is None
    assert stats.mode.startswith("llama.cpp's own path: everything fits")
    assert answer(engine, b"p", b"a\xe2\x82") == "a\ufffd"  # a broken character at the end


def test_only_new_tokens_are_evaluated(engine, context):
    answer(engine, b"hello", b"xyz")
    assert context.kept == list(b"helloxyz")
    context.calls.clear()
    answer(engine, b"helloxyz more", b"!")
    assert context.calls[0] == (list(b" more"), 8)
    assert engine.last_stats.evaluated_tokens == 5
    context.calls.clear()
    answer(engine, b"hello you", b"!")
    assert context.calls[0] == (list(b" you"), 5)
    for _ in range(2):
        answer(engine, b"same", b"")
    assert context.calls[-1] == (list(b"e"), 3)  # the last token, for its logits


def test_memory_that_cannot_be_cut_starts_over(engine, context):
    answer(engine, b"hello", b"ab")
    context.can_cut = False
    answer(engine, b"help", b"cd")
    assert context.kept == list(b"helpcd")


def test_long_prompts_go_in_batches(engine, context):
    seen: list[tuple[int, int]] = []
    script(b"", END)
    list(engine.generate(list(range(1, 21)), GREEDY, 5, lambda *at: seen.append(at)))
    assert [len(tokens) for tokens, _ in context.calls] == [8, 8, 4]
    assert seen == [(0, 20), (8, 20), (16, 20), (20, 20)]


@cases(
    "prompt, max_tokens, said, finish, kept",
    (b"p", 3, "xxx", "length", 3),
    (b"p" * 60, 100, "xxxxx", "context", 64),
)
def test_an_answer_that_is_cut(engine, context, prompt, max_tokens, said, finish, kept):
    script(b"x" * 200)
    assert answer(engine, prompt, max_tokens=max_tokens) == said
    assert (engine.last_stats.finish, engine.last_stats.tokens) == (finish, len(said))
    assert len(context.kept) == kept


@cases(
    "prompt, asked, advice",
    (b"", 64, "empty"),
    (b"p" * 64, 64, "64: shorten it, or raise --ctx"),
    (b"p" * 64, 10**6, "made for no more"),
)
def test_impossible_prompts(engine, prompt, asked, advice):
    engine._steps._asked_ctx = asked
    with pytest.raises(ConfigError, match=advice):
        answer(engine, prompt)


def test_cancel_between_tokens(engine):
    script(b"abcdef")
    pieces = []
    for piece in engine.generate([5], GREEDY, 6):
        pieces.append(piece)
        if piece == "b":
            engine.cancel()
    assert pieces == ["a", "b"]
    assert engine.last_stats.finish == "cancelled"
    assert answer(engine, b"next", b"z") == "z"


def test_cancel_inside_a_step_leaves_the_cache_whole(engine, context):

    def cancelled():
        engine.cancel()
        return 2

    answer(engine, b"hello", b"ab")
    kept = list(context.kept)
    context.before_decode = cancelled
    assert answer(engine, bytes(kept) + b"more") == ""
    assert context.kept == kept
    context.before_decode = lambda: 0
    assert answer(engine, bytes(kept) + b"more", b"c") == "c"


def test_closing_early_is_a_cancel(engine):
    script(b"abc")
    stream = engine.generate([5], GREEDY, 3)
    next(stream)
    stream.close()
    assert (engine.last_stats.finish, engine.last_stats.tokens) == ("cancelled", 1)


@cases(
    "status, error, text",
    (1, ConfigError, "full"),
    (-3, NativeError, "scripted"),
    (2, NativeError, "evaluate"),
)
def test_failed_steps(engine, context, status, error, text):
    context.before_decode = lambda: status
    with pytest.raises(error, match=text):
        answer(engine, b"hello")
    context.before_decode = lambda: 0
    assert answer(engine, b"hello", b"z") == "z"


def test_eval(engine, context):
    logits = engine.eval(list(b"0123456789"), 0)
    assert logits.shape == (1, 256)
    assert context.kept == list(b"0123456789")
    engine.eval([9], 4)
    assert context.kept == [*b"0123", 9]
    for tokens, pos in (([1], 7), ([1], -1), ([], 0)):
        with pytest.raises(ConfigError):
            engine.eval(tokens, pos)
    with pytest.raises(ConfigError, match="logits_all"):
        next(engine.eval_each([1], 0))


def test_begin_token_stands_once(engine):
    engine._template.render = lambda messages: "<s>hi"
    assert engine.render_chat([]) == list(b"<s>hi")
    engine._template.render = lambda messages: "hi"
    assert engine.render_chat([]) == [1, *b"hi"]
    assert engine.tokenize("hi") == [1, *b"hi"]
    assert engine.tokenize("hi", special=False) == list(b"hi")


def test_retention_is_checked(engine):
    with pytest.raises(ConfigError):
        engine.change("retention", 1.5)
    assert engine.change("retention", 0.5) is False  # the plain path: nothing to retain
    assert engine.config.given("retention") == 0.5


def test_a_policy_that_cannot_start_changes_nothing(engine):
    mode = engine.mode
    with pytest.raises(ConfigError, match="belady"):
        engine.set_policy("belady")
    with pytest.raises(NativeError, match="no store"):
        engine.set_policy("lru")
    assert (engine.config.policy, engine.mode) == ("plain", mode)
    assert answer(engine, b"hello", b"z") == "z"
