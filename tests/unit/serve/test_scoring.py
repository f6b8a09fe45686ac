"""`echo` with logprobs: accepted requests, the form of the answer, and lm_eval as a client."""

import json
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from asgi import ask
from fake_served import FakeServed, app_for, assert_refused, whole
from served import DEMO, HANG_S, running
from tables import cases
from waiting import wait_until

from orchestrator.config import Config
from orchestrator.events import Phase
from orchestrator.lab.eval.judge import Judge
from orchestrator.runtime.evaluator import log_softmax
from orchestrator.runtime.runtime import Runtime
from orchestrator.serve.bodies import Words
from orchestrator.serve.served import (
    SCORE_BYTES,
    SCORED_MOST,
    SCORED_TOKENS,
    answering,
    most_scored,
)
from orchestrator.serve.settings import ServeSettings
from orchestrator.serve.state import Stopped

PATH = "/v1/completions"
ASK = {"prompt": "ab", "echo": True, "logprobs": 1, "max_tokens": 0}
BEGIN, N_VOCAB = 256, 257
# Enough for the demo model with two contexts of 512 tokens.
RAM = "160MiB"
TEXT = "The fox sat by the river and looked at the stars. A star, they said, is hot and far away. "


class ByteModel:
    """A vocabulary of all bytes and one begin token."""

    n_vocab = N_VOCAB

    def __init__(self, begins=False, spaced=False):
        self.begins, self.spaced = begins, spaced

    def tokenize(self, text, add_special, parse_special):
        assert parse_special
        space = " " * (self.spaced and bool(text))
        return [BEGIN] * (add_special and self.begins) + list((space + text).encode())

    def piece(self, token, special=False):
        return b"<s>" * special if token == BEGIN else bytes([token])

    def bos(self):
        return "<s>"

    def adds_bos(self):
        return self.begins

    def is_end(self, token):
        return token == ord("z")


class ScoringServed(FakeServed):
    """A model in which token n is followed by n + 1 with probability 2/3 and by n + 2 with 1/3."""

    def __init__(self, model=None, error=None):
        super().__init__(whole())
        self.about.name = "bytes"
        self.vocabulary = model or ByteModel()
        self.error = error

    @contextmanager
    def evaluator(self):
        yield SimpleNamespace(eval_each=self.eval_each, costs=lambda: {"hit_rate": 0.5})

    def eval_each(self, tokens, pos, phase):
        assert (pos, phase) == (0, Phase.PREFILL)
        if self.error is not None:
            raise self.error
        for part in np.array_split(tokens, 2):
            rows = np.full((len(part), N_VOCAB), -np.inf, np.float32)
            for row, token in zip(rows, part.tolist(), strict=True):
                row[[(token + 1) % N_VOCAB, (token + 2) % N_VOCAB]] = np.log([2, 1])
            yield rows


def scored(data, model=None):
    reply = ask(app_for(ScoringServed(model)), PATH, data)
    assert reply.status == 200, reply.body
    return reply.json()


NO_PROMPTS = ([], [[]], ["a", 1], [True], [1.5], [2**70], [-1], {"prompt_string": "a"})


@cases(
    "change, names",
    *[({"logprobs": wrong}, "logprobs") for wrong in (None, True, "1")],
    ({"logprobs": 6}, "from 0 to 5"),
    *[({"max_tokens": wrong}, "max_tokens") for wrong in (None, 2, -1, True)],
    ({"max_tokens": 1}, "temperature"),
    ({"max_tokens": 1, "temperature": 0.5}, "temperature"),
    ({"stream": True}, "stream"),
    ({"n": 2}, "leave out n"),
    ({"n_cmpl": 3}, "leave out n_cmpl"),
    ({"n_predict": 50}, "leave out n_predict"),
    ({"n_predict": -1}, "leave out n_predict"),
    ({"max_completion_tokens": 0}, "leave out max_completion_tokens"),
    ({"stop": ["a"]}, "stop"),
    ({"logit_bias": {"1": 1}}, "logit_bias"),
    ({"echo": "yes"}, "echo must be"),
    ({"echo": 1}, "echo must be"),
    ({"prompt": None}, "prompt is missing"),
    *[({"prompt": wrong}, "prompt must be") for wrong in NO_PROMPTS],
    ({"prompt": ""}, "empty"),
    ({"prompt": ["a", ""]}, "empty"),
    ({"prompt": [N_VOCAB]}, f"token {N_VOCAB}"),
    ({"prompt": "a" * 513}, "513 tokens exceeds"),
    ({"prompt": "a" * 512, "max_tokens": 1, "temperature": 0}, "512 tokens exceeds"),
    ({"prompt": ["a" * 512] * 33}, "together"),
)
def test_other_forms_of_echo_are_refused(change, names):
    served = ScoringServed()
    assert_refused(app_for(served), PATH, ASK | change, names)
    assert not served.asked


def test_without_echo_nothing_changes():
    served = ScoringServed()
    data = ASK | {"echo": False, "logprobs": 5, "max_tokens": 9}
    assert ask(app_for(served), PATH, data).status == 200
    assert json.loads(served.asked[0][1]) == data


HALVES = ["a", "bytes:\\xc3", "bytes:\\xa4", "b"]


@cases(
    "model, prompt, text, tokens, logp, offsets",
    (ByteModel(), "abd", "abd", ["a", "b", "d"], [None, 2 / 3, 1 / 3], [0, 1, 2]),
    # Tokens, and bytes that form one character together.
    (ByteModel(), list("aäb".encode()), "aäb", HALVES, [None, 0, 0, 0], [0, 1, 1, 2]),
    # A begin token or space that the tokenizer adds is no part of the text, but the first token is
    # predicted from it.
    (ByteModel(begins=True), "ab", "ab", ["a", "b"], [0, 2 / 3], [0, 1]),
    (ByteModel(begins=True), "<s>a", "<s>a", ["<", "s", ">", "a"], [None, 0, 0, 0], range(4)),
    (ByteModel(begins=True), [BEGIN, 0, 1], "<s>\0\1", ["<s>", "\0", "\1"], None, [0, 3, 4]),
    (ByteModel(spaced=True), "ab", "ab", [" ", "a", "b"], [None, 0, 2 / 3], [0, 0, 1]),
)
def test_scores_have_openais_form(model, prompt, text, tokens, logp, offsets):
    answer = scored(ASK | {"prompt": prompt, "logprobs": 2}, model)
    (choice,) = answer["choices"]
    assert answer["object"] == "text_completion" and answer["model"] == "bytes"
    assert choice["text"] == text and choice["index"] == 0 and choice["finish_reason"] == "length"
    found = choice["logprobs"]
    assert found["tokens"] == tokens and found["text_offset"] == list(offsets)
    if logp is not None:
        expected = [each and float(np.log(each)) for each in logp]
        expected = [-9999.0 if each == 0 else each for each in expected]
        assert found["token_logprobs"] == pytest.approx(expected)
    for named, value, token in zip(
        found["top_logprobs"], found["token_logprobs"], tokens, strict=True
    ):
        if value is None:
            assert named is None
            continue
        assert named[token] == value
        likeliest = sorted(named.values(), reverse=True)[:2]
        assert likeliest == pytest.approx(np.log([2 / 3, 1 / 3]).tolist())
    usage = answer["usage"]
    n_tokens = usage["prompt_tokens"]
    assert (usage["completion_tokens"], usage["total_tokens"]) == (0, n_tokens)
    assert answer["timings"]["hit_rate"] == 0.5 and answer["timings"]["prompt_n"] == n_tokens


@cases("prompt, text, finish", ("ab", "abc", "length"), ("xy", "xyz", "stop"))
def test_max_tokens_1_appends_the_likeliest_token(prompt, text, finish):
    answer = scored(ASK | {"prompt": [prompt, "a"], "max_tokens": 1, "temperature": 0})
    first, second = answer["choices"]
    assert first["text"] == text and first["finish_reason"] == finish
    assert second["text"] == "ab" and second["index"] == 1
    assert first["logprobs"]["token_logprobs"][1:] == pytest.approx([np.log(2 / 3)] * 2)
    assert first["logprobs"]["top_logprobs"][-1] == {text[-1]: pytest.approx(np.log(2 / 3))}
    assert answer["usage"]["completion_tokens"] == 2


def test_scored_tokens_are_limited_by_the_plan():
    config = Config.build(model="a.gguf")
    longer = config.with_changes(ctx=SCORED_MOST + 100)
    assert [most_scored(each) for each in (config, longer)] == [SCORED_MOST, SCORED_MOST + 100]
    settings, words = ServeSettings(body_limit=1000), Words("gpt2", "")
    planned = [
        answering(each, settings, words, "").request(each).needs.extra_bytes
        for each in (config, longer)
    ]
    assert planned[1] - planned[0] == 100 * SCORE_BYTES
    served = ScoringServed()
    served.most_scored = 3
    asked = ASK | {"prompt": ["ab", "cd"]}
    assert_refused(app_for(served), PATH, asked, "the limit with the field echo is 3")


@cases(
    "error, status, says",
    (Stopped(), 503, "shutting down"),
    (RuntimeError("no idea"), 500, "the policy failed"),
)
def test_failures_of_scoring_are_reported(error, status, says):
    assert_refused(app_for(ScoringServed(error=error)), PATH, ASK, says, status)


OPTIONS = ("--policy", "lru", "--high-tier", "q4_k", "--ctx", "512", "--ram", RAM)
live = running(*OPTIONS, "--parallel=2", "--exact")


@pytest.fixture(scope="module")
def engine(library):
    """The demo model with micro-batches as large as those in which the server scores."""
    settings = {"ctx": 512, "threads": 1, "policy": "lru", "high_tier": "q4_k", "exact": True}
    config = Config.build(model=DEMO, ubatch=SCORED_TOKENS, logits_all=True, **settings)
    with Runtime.open(config) as opened, opened.evaluator() as evaluator:
        yield evaluator


def likelihood(engine, tokens, first, n_more=0):
    """(log-likelihood of the tokens from `first` on, whether all were the likeliest). n_more:
    further tokens that are read after them."""
    found = Judge(engine, prefill=True).rows([*tokens, *[0] * n_more], first)
    rows = [log_softmax(row) for row in found][: len(tokens) - first]
    logp = [float(row[token]) for row, token in zip(rows, tokens[first:], strict=True)]
    best = [float(row.max()) for row in rows]
    return sum(logp), logp == best


def test_the_openai_client_scores_within_the_plan(live, engine):
    openai = pytest.importorskip("openai", reason="the openai package is missing")
    client = openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0)
    common = {"model": "any", "echo": True, "logprobs": 5, "max_tokens": 0}
    tokens = engine.tokenize(TEXT * 10)
    by_text = client.completions.create(prompt=TEXT * 10, **common)
    by_tokens = client.completions.create(prompt=[tokens, tokens], **common)
    assert by_text.choices[0].text == TEXT * 10
    found = by_text.choices[0].logprobs
    for choice in by_tokens.choices:
        assert choice.logprobs == found and choice.text == TEXT * 10
    assert sum(found.token_logprobs[1:]) == likelihood(engine, tokens, 1)[0]
    timings = by_tokens.timings
    assert timings["peak_rss_bytes"] <= timings["ram_bytes"]
    with pytest.raises(openai.BadRequestError, match="echo"):
        client.completions.create(model="any", prompt="a", echo=True)


def test_scoring_does_not_change_a_running_answer(live):
    """Scoring waits for the running answer and does not change it."""
    data = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 200, "ignore_eos": True}
    alone = live.post(PATH, data)["choices"][0]["text"]
    answer = live.asked(PATH, data | {"stream": True}).getresponse()
    first = answer.readline()
    scores = []
    asked = ASK | {"prompt": TEXT}
    scoring = threading.Thread(target=lambda: scores.append(live.post(PATH, asked)))
    scoring.start()
    events = [first, *answer]
    scoring.join(HANG_S)
    said = [json.loads(line[6:]) for line in events if line.startswith(b"data: {")]
    assert "".join(each["choices"][0]["text"] for each in said if each["choices"]) == alone
    of_this_run = {"timings": None, "id": "", "created": 0}
    assert scores[0] | of_this_run == live.post(PATH, asked) | of_this_run
    assert live.post(PATH, data)["choices"][0]["text"] == alone


def test_scoring_ends_if_the_client_leaves(live):
    for _ in range(3):
        connection = live.asked(PATH, ASK | {"prompt": [[5] * 500] * 30})
        live.until_running(1)
        connection.close()
    live.until_running(0)
    # A request that was read to its end would have another status.
    ended = "POST /v1/completions 499"
    wait_until(
        lambda: sum(ended in line for line in live.lines) == 3, "requests were read to their end"
    )
    assert live.post(PATH, ASK)["choices"]


class Tokens:
    """The demo model's tokenizer with the interface that lm_eval expects."""

    eos_token, bos_token = "<|im_end|>", None
    chat_template = None

    def __init__(self, engine):
        self._engine = engine
        self.eos_token_id, self.bos_token_id = engine.tokenize(self.eos_token)[0], None

    def encode(self, text):
        return self._engine.tokenize(text)

    def batch_decode(self, several):
        return [
            b"".join(
                self._engine.inside.llama.piece(token, special=True) for token in tokens
            ).decode()
            for tokens in several
        ]


@pytest.mark.parametrize(
    "more",
    [{}, {"batch_size": 3}, {"num_concurrent": 3}, {"tokenized_requests": False}],
    ids=["tokens", "several", "at-once", "texts"],
)
def test_lm_evals_loglikelihood(live, engine, more):
    pytest.importorskip("lm_eval", reason="needs lm_eval: pip install -e '.[eval]'")
    pytest.importorskip("tenacity", reason="needs lm_eval for servers: pip install 'lm_eval[api]'")
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    usual = {"model": "any", "tokenizer_backend": "none", "max_length": 512, "max_retries": 1}
    lm = LocalCompletionsAPI(base_url=live.url + PATH, **usual, **more)
    lm.tokenizer_backend, lm.tokenizer = "remote", Tokens(engine)
    lm.tokenized_requests = more.get("tokenized_requests", True)

    def requests(kind, *args):
        return [Instance(kind, {}, each, number) for number, each in enumerate(args)]

    pairs = [
        ("What is the capital of Norway?", " Oslo"),
        ("The fox sat by", " the river"),
        ((TEXT * 4).strip(), " The fox"),
        ("Once upon a", " time"),
    ]
    found = lm.loglikelihood(requests("loglikelihood", *pairs))
    expected = []
    for context, continuation in pairs:
        n_context = len(engine.tokenize(context))
        expected.append(likelihood(engine, engine.tokenize(context + continuation), n_context, 1))
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert {greedy for _, greedy in found} == {True, False}
    assert [logp for logp, _ in found] == pytest.approx([logp for logp, _ in expected], abs=1e-9)
    (whole,) = lm.loglikelihood_rolling(requests("loglikelihood_rolling", (TEXT * 2,)))
    tokens = [lm.prefix_token_id, *engine.tokenize(TEXT * 2)]
    assert whole == pytest.approx(likelihood(engine, tokens, 1, 1)[0], abs=1e-9)
