"""Scores prompts: `/v1/completions` with `echo` and `logprobs`, as lm_eval uses it.

llama.cpp's server does not support this. The runtime's evaluator reads each prompt while no other
request decodes. Token probabilities are the same as those of `moe-edge eval --prefill`.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from time import monotonic, time
from typing import Any
from uuid import uuid4

import numpy as np

from orchestrator.errors import NativeError, sentence_of
from orchestrator.events import Phase
from orchestrator.native.llama import Model
from orchestrator.runtime.evaluator import Evaluator, log_softmax
from orchestrator.serve.admission import Body, finish_despite_cancel
from orchestrator.serve.schemas import SEVERAL
from orchestrator.serve.served import Served
from orchestrator.serve.state import State, Stopped
from orchestrator.serve.wire import COMPLETIONS, LIMITS, STOPPING, Refusal, beyond_context

# Fields that would change the predicted tokens or the end of the answer.
_NOT_WITH = ("stop", "logit_bias", "grammar", "json_schema")
# Replaces minus infinity, which JSON does not have.
_LEAST = -9999.0
# The number of tokens that are serialized at once.
_PIECE_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens of a prompt whose log-probabilities a client wants.

    `tokens` is int32 [n]. The server added the first `n_hidden` tokens, such as BOS. `text` is the
    prompt as the client sent it, or None if the client sent tokens.
    """

    tokens: np.ndarray
    n_hidden: int = 0
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities of the tokens of a prompt, and of the tokens generated after it.

    n is the number of all these tokens, of which the last n_generated (0 or 1) were generated.
    `tokens` is int32 [n]. `logp` is float64 [n]; its first value is nan if no token precedes the
    first one. `likeliest` (int32) and `likeliest_logp` (float64), both [n, top], are the most
    likely tokens at each position, best first.
    """

    tokens: np.ndarray
    logp: np.ndarray
    likeliest: np.ndarray
    likeliest_logp: np.ndarray
    n_generated: int


# (decoded text, int32 [n] with the character offset of each token).
Text = tuple[str, np.ndarray]


def wants_scores(route: str, data: dict[str, Any]) -> bool:
    """Return whether a request asks for the log-probabilities of its prompt's tokens (`echo`).

    `data` was already checked against the schema of the request. Raises Refusal (an error response)
    if a request with `echo` lacks `logprobs`, or has a field that scoring does not support.
    """
    if route != COMPLETIONS or not data.get("echo"):
        return False
    if "logprobs" not in data:
        raise Refusal(400, "the field echo requires the field logprobs: add logprobs")
    if data.get("max_tokens") not in (0, 1):
        raise Refusal(
            400,
            "with the field echo, max_tokens must be 0 or 1: give 0 to score only the prompt",
        )
    for name in LIMITS:
        if name != "max_tokens" and name in data:
            raise Refusal(
                400, f"the field echo does not support {name}: leave out {name} and use max_tokens"
            )
    if data.get("stream"):
        raise Refusal(400, "the field echo does not support streams: leave out the field stream")
    for name in SEVERAL:
        if data.get(name, 1) != 1:
            raise Refusal(
                400, f"the field echo supports one answer for each prompt: leave out {name}"
            )
    if data["max_tokens"] and data.get("temperature") != 0:
        raise Refusal(
            400,
            "with the field echo and max_tokens 1, temperature must be 0: set temperature to 0",
        )
    for name in _NOT_WITH:
        if data.get(name):
            raise Refusal(400, f"the field echo does not support {name}: leave {name} out")
    return True


async def score(state: State, served: Served, body: Body) -> Iterator[bytes]:
    """Compute the log-probabilities of a request's prompts. Return the answer as pieces of JSON.

    The answer has OpenAI's completion format. Call this only if wants_scores returned True. No
    other request may decode meanwhile, and all sequences are empty afterwards. A cancel takes
    effect after the current part of the prompt. Raises Refusal (an error response) if a prompt
    cannot be scored.
    """
    text, given_up = body.take(), threading.Event()

    def goes_on() -> bool:
        return not (given_up.is_set() or state.stopping)

    data, prompts = await body.run(lambda: _prompts(served, text))
    top, n_generated = data["logprobs"], data["max_tokens"]
    args = (served, prompts, top, n_generated, goes_on)
    work = asyncio.get_running_loop().run_in_executor(state.quick, _scored, *args)
    try:
        # Wait for the end of the work before the request's place is returned.
        found, timings = await finish_despite_cancel(work, given_up.set)
    except Stopped:
        raise STOPPING from None
    except Exception as error:  # noqa: BLE001 - a policy may raise anything
        raise Refusal(500, sentence_of(error)) from None
    return _written(served.about.name, served.runtime.vocabulary, found, timings)


def _prompts(served: Served, body: bytes) -> tuple[dict[str, Any], list[Prompt]]:
    """Parse a request, and return (request, its tokenized prompts).

    Can take seconds for long texts. Raises Refusal (an error response) for prompts that cannot be
    scored.
    """
    data = json.loads(body)
    model, room = served.runtime.vocabulary, served.about.n_ctx - data["max_tokens"]
    prompts = [read_prompt(model, asked, room) for asked in _asked(data.get("prompt"))]
    n_tokens, most = sum(len(prompt.tokens) for prompt in prompts), served.most_scored
    if n_tokens > most:
        raise Refusal(
            400,
            f"the prompts have {n_tokens} tokens together, and the limit with the field echo is "
            f"{most}: send fewer prompts at once",
        )
    return data, prompts


def _scored(
    served: Served,
    prompts: Sequence[Prompt],
    top: int,
    n_generated: int,
    goes_on: Callable[[], bool],
) -> tuple[list[tuple[Scores, Text]], dict[str, Any]]:
    """Compute the log-probabilities of prompts, and return (results, timings).

    The results are (scores, text of the tokens with their offsets) for each prompt. The timings are
    JSON fields. Call this on a thread. `top` is the number of alternatives for each token.
    n_generated is the number of generated tokens, 0 or 1. Raises Stopped if `goes_on` returns
    False, and any exception of the runtime or a policy.
    """
    found = []
    with served.runtime.evaluator() as evaluator:
        began_s = monotonic()
        for prompt in prompts:
            read = prompt.tokens if n_generated else prompt.tokens[:-1]
            rows = _logits(evaluator, read.tolist(), goes_on) if len(read) else ()
            scores = judged(prompt, rows, top, n_generated)
            found.append((scores, _text_of(served.runtime.vocabulary, scores, prompt.text)))
        costs = evaluator.costs()
    timings = {
        "prompt_n": sum(len(prompt.tokens) for prompt in prompts),
        "prompt_ms": 1000 * (monotonic() - began_s),
        "predicted_n": n_generated * len(prompts),
        "predicted_ms": 0.0,
        **costs,
        "shared_steps": False,
    }
    return found, timings


def _logits(
    evaluator: Evaluator, tokens: list[int], goes_on: Callable[[], bool]
) -> Iterator[np.ndarray]:
    """Evaluate a prompt, and yield the logits of its tokens in parts, float32 [m, n_vocab].

    Each array is valid until the next one is yielded. `goes_on` is called before each part, and
    Stopped is raised if it returns False. Raises MoeEdgeError and any exception of a policy.
    """
    parts = evaluator.eval_each(tokens, 0, Phase.PREFILL)
    while True:
        if not goes_on():
            raise Stopped
        try:
            part = next(parts, None)
        except NativeError:
            if goes_on():
                raise
            raise Stopped from None
        if part is None:
            return
        yield part


def judged(prompt: Prompt, parts: Iterable[np.ndarray], top: int, n_generated: int) -> Scores:
    """Return the log-probabilities of a prompt's tokens, and the likeliest tokens at each position.

    Tokens that the server added, such as BOS, are left out. If n_generated is 1, the result ends
    with the most likely token after the prompt. Otherwise n_generated is 0.

    `parts` are arrays of logits, float32 [m, n_vocab]. Together they have a row for each token of
    the prompt, which predicts the next token. If n_generated is 0, the last token has no row. `top`
    is the number of likeliest tokens to return for each position.
    """
    n_prompt = len(prompt.tokens)
    n = n_prompt + n_generated
    tokens = np.append(prompt.tokens, np.zeros(n_generated, np.int32)).astype(np.int32)
    logps, likeliest_logp = np.full(n, np.nan), np.full((n, top), np.nan)
    likeliest = np.zeros((n, top), np.int32)
    for at, row in enumerate((row for rows in parts for row in rows), 1):
        logp = log_softmax(row)
        if at == n_prompt:
            tokens[at] = logp.argmax()
        logps[at] = logp[tokens[at]]
        if top:
            best = np.argpartition(logp, -top)[-top:]
            best = best[np.lexsort((best, -logp[best]))]
            likeliest[at], likeliest_logp[at] = best, logp[best]
    kept = slice(prompt.n_hidden, None)
    return Scores(tokens[kept], logps[kept], likeliest[kept], likeliest_logp[kept], n_generated)


def _written(
    name: str, model: Model, found: Sequence[tuple[Scores, Text]], timings: dict[str, Any]
) -> Iterator[bytes]:
    """Yield the scores of all prompts in the format of OpenAI's completions, as pieces of JSON.

    One text with the whole answer would take many times the memory of the scores.
    """
    n_prompt, n_generated = timings["prompt_n"], timings["predicted_n"]
    head = {
        "id": f"cmpl-{uuid4().hex}",
        "object": "text_completion",
        "created": int(time()),
        "model": name,
        "usage": {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_generated,
            "total_tokens": n_prompt + n_generated,
        },
        "timings": timings,
    }
    yield _json(head)[:-1] + b', "choices": ['
    for index, (scores, text) in enumerate(found):
        yield b", " * bool(index)
        yield from _choice(index, model, scores, text)
    yield b"]}"


def _choice(index: int, model: Model, scores: Scores, text: Text) -> Iterator[bytes]:
    """Yield the scores of one prompt as a choice of OpenAI's completions, in pieces of JSON."""
    tokens, logp = scores.tokens.tolist(), scores.logp.tolist()
    is_end = scores.n_generated and model.is_end(tokens[-1])
    choice = {"index": index, "text": text[0], "finish_reason": "stop" if is_end else "length"}
    others = zip(tokens, logp, scores.likeliest, scores.likeliest_logp, strict=True)
    lists: dict[str, Iterator[Any]] = {
        "tokens": (_name(model, token) for token in tokens),
        "token_logprobs": map(_number, logp),
        "top_logprobs": (_likeliest(model, *each) for each in others),
        "text_offset": iter(text[1].tolist()),
    }
    yield _json(choice)[:-1] + b', "logprobs": {'
    for number, (name, values) in enumerate(lists.items()):
        yield b", " * bool(number) + _json(name) + b": "
        yield from _listed(values)
    yield b"}}"


def _text_of(model: Model, scores: Scores, given: str | None) -> Text:
    """Return the text of the scored tokens, and the offset of each token in characters.

    `given` is the prompt as the client sent it. It replaces the decoded text, because a tokenizer
    may add a leading space.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    n_tokens, n_chars = len(scores.tokens), 0
    text, offsets = [], np.zeros(n_tokens, np.int32)
    for at, token in enumerate(scores.tokens.tolist()):
        offsets[at] = n_chars
        text.append(decoder.decode(model.piece(token, special=True)))
        n_chars += len(text[-1])
    text.append(decoder.decode(b"", final=True))
    if given is None:
        return "".join(text), offsets
    generated = "".join(text[n_tokens - scores.n_generated :])
    n_added = n_chars - len(generated) - len(given)
    return given + generated, np.maximum(0, offsets - n_added)


def _likeliest(
    model: Model, token: int, logp: float, others: np.ndarray, their_logp: np.ndarray
) -> dict[str, float] | None:
    """Return {text: log-probability} of the actual token and the most likely tokens.

    Returns None if the actual token has no log-probability (nan).
    """
    if np.isnan(logp):
        return None
    named: dict[str, float] = {}
    for other, value in (*zip(others.tolist(), their_logp.tolist(), strict=True), (token, logp)):
        named.setdefault(_name(model, other), max(value, _LEAST))
    return named


def _name(model: Model, token: int) -> str:
    """Return a token's text, or its bytes in hexadecimal if it is only part of a character.

    OpenAI writes such tokens in the same way.
    """
    piece = model.piece(token, special=True)
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _number(value: float) -> float | None:
    return None if np.isnan(value) else max(value, _LEAST)


def _listed(values: Iterator[Any]) -> Iterator[bytes]:
    """Yield the JSON text of a list in pieces."""
    yield b"["
    separator = b""
    while some := list(islice(values, _PIECE_TOKENS)):
        yield separator + _json(some)[1:-1]
        separator = b", "
    yield b"]"


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")


def _asked(prompt: Any) -> list[str] | list[list[int]]:
    """Return the prompts in the field `prompt`, which has one of four formats.

    The field is a text, a list of tokens, or a list of several of these. Raises Refusal (an error
    response) for any other value.
    """
    one = isinstance(prompt, str) or (isinstance(prompt, list) and _are_tokens(prompt))
    several: list[Any] = [prompt] if one else prompt
    if isinstance(several, list) and several:
        if all(isinstance(each, str) for each in several):
            return several
        if all(isinstance(each, list) and _are_tokens(each) for each in several):
            return several
    raise Refusal(400, "prompt must be a text, a list of tokens, or a list of several of these")


def _are_tokens(values: list[Any]) -> bool:
    return bool(values) and all(type(each) is int for each in values)


def read_prompt(model: Model, asked: str | list[int], most: int) -> Prompt:
    """Return a tokenized prompt.

    `asked` is a text or token ids, and `most` is the number of tokens that fit in the context.
    Raises Refusal (an error response) for an empty or too long prompt and for unknown token ids.
    """
    if isinstance(asked, str):
        # A text that starts with the BOS token's name gets no second BOS.
        bos = model.bos()
        begins = model.adds_bos() and not (bos and asked.startswith(bos))
        found = model.tokenize(asked, add_special=begins, parse_special=True)
        begin = model.tokenize("", add_special=True, parse_special=True)[:1] if begins else []
        n_hidden = int(bool(begin) and found[:1] == begin)
        prompt = Prompt(np.array(found, np.int32), n_hidden, asked)
    else:
        wrong = next((each for each in asked if not 0 <= each < model.n_vocab), None)
        if wrong is not None:
            raise Refusal(
                400, f"prompt has token {wrong}: the model's token ids are 0 to {model.n_vocab - 1}"
            )
        prompt = Prompt(np.array(asked, np.int32))
    n_tokens = len(prompt.tokens)
    if n_tokens == prompt.n_hidden:
        raise Refusal(400, "a prompt is empty: the field echo needs at least one token to score")
    if n_tokens > most:
        raise beyond_context(f"the prompt of {n_tokens} tokens", n_tokens, most)
    return prompt
