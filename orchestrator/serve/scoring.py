"""How likely a prompt is: `echo` with logprobs, which lm_eval asks `/v1/completions` for.

llama.cpp's server has no such answer. A prompt is read by itself, in parts, while nothing else
decodes, and its tokens are judged as those of `moe-edge eval --prefill` are.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import islice
from time import monotonic, time
from typing import Any
from uuid import uuid4

import numpy as np

from orchestrator.engine.texts import log_softmax
from orchestrator.native.llama import Model
from orchestrator.serve.admission import outlasting
from orchestrator.serve.backend import Backend, Stopped, sentence_of
from orchestrator.serve.schemas import SEVERAL
from orchestrator.serve.state import STOPPING
from orchestrator.serve.wire import COMPLETIONS, LIMITS, Refusal, beyond_context

# What would change which token follows, or where the answer ends.
_NOT_WITH = ("stop", "logit_bias", "grammar", "json_schema")
# What JSON has in the place of minus infinity.
_LEAST = -9999.0
# So many tokens of an answer are written at once.
_PIECE_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Prompt:
    """tokens int32 [n], the first n_hidden of which the server put there: the begin token that the
    model wants before a text. text: what was asked; None where tokens were."""

    tokens: np.ndarray
    n_hidden: int = 0
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Text:
    """What tokens say, and where in it each of them begins, in characters: int32 [n]."""

    whole: str
    offsets: np.ndarray


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities of a prompt's tokens and of the n_behind that follow it, n in all: tokens
    int32 [n], logp float64 [n], nan for a token with nothing before it; the likeliest tokens there,
    the best first, likeliest int32 [n, top] and likeliest_logp float64 [n, top]."""

    tokens: np.ndarray
    logp: np.ndarray
    likeliest: np.ndarray
    likeliest_logp: np.ndarray
    n_behind: int


def wants_scores(route: str, data: dict[str, Any]) -> bool:
    """Whether a request is for the likelihood of its prompt; data: as its schema has it. Raises
    Refusal for any other echo."""
    if route != COMPLETIONS or not data.get("echo"):
        return False
    if "logprobs" not in data:
        raise Refusal(400, "echo needs logprobs: it is for the likelihood of a prompt")
    if data.get("max_tokens") not in (0, 1):
        raise Refusal(400, "echo needs max_tokens of 0 or 1: it is for the likelihood of a prompt")
    for name in LIMITS:
        if name != "max_tokens" and name in data:
            raise Refusal(400, f"echo goes by max_tokens alone: leave {name} out")
    if data.get("stream"):
        raise Refusal(400, "echo is not served as a stream: leave stream out")
    for name in SEVERAL:
        if data.get(name, 1) != 1:
            raise Refusal(400, f"echo is served once for each prompt: leave {name} out")
    if data["max_tokens"] and data.get("temperature") != 0:
        raise Refusal(400, "echo with max_tokens of 1 needs temperature 0: the likeliest token")
    for name in _NOT_WITH:
        if data.get(name):
            raise Refusal(400, f"echo is for the likelihood of a prompt: leave {name} out")
    return True


class Scoring:
    """One such request, from its prompts to its answer."""

    def __init__(
        self,
        backend: Backend,
        workers: Executor,
        data: dict[str, Any],
        is_stopping: Callable[[], bool],
    ) -> None:
        """data: for which wants_scores was true. workers: one thread, which computes. May take a
        while for long texts; any thread. Raises Refusal for prompts that cannot be scored."""
        self._backend, self._workers, self._is_stopping = backend, workers, is_stopping
        self._top: int = data["logprobs"]
        self._n_behind: int = data["max_tokens"]
        model, room = backend.engine.llama, backend.slot_context - self._n_behind
        self._prompts = [_read(model, asked, room) for asked in _asked(data.get("prompt"))]
        n_tokens = sum(len(prompt.tokens) for prompt in self._prompts)
        most = backend.most_scored
        if n_tokens > most:
            raise Refusal(
                400,
                f"the prompts have {n_tokens} tokens together, and a request with echo {most} at "
                f"most: send fewer prompts at once",
            )

    async def answer(self, sequence: int) -> Iterator[bytes]:
        """Scores the prompts on a sequence, while no request decodes; the parts of a JSON object.
        Where it is cancelled it ends with the part that is computed. Raises Refusal."""
        given_up = threading.Event()

        def goes_on() -> bool:
            return not (given_up.is_set() or self._is_stopping())

        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._workers, self._score, sequence, goes_on)
        try:
            # The place is given back when the work has ended, and not before.
            found, timings = await outlasting(work, given_up.set)
        except Stopped:
            raise STOPPING from None
        except Exception as error:  # noqa: BLE001 - whatever a policy raised
            raise Refusal(500, sentence_of(error)) from None
        return _written(self._backend.name, self._backend.engine.llama, found, timings)

    def _score(
        self, sequence: int, goes_on: Callable[[], bool]
    ) -> tuple[list[tuple[Scores, Text]], dict[str, Any]]:
        costs, began_s = self._backend.costs(), monotonic()
        found = []
        for prompt in self._prompts:
            read = prompt.tokens if self._n_behind else prompt.tokens[:-1]
            rows = self._backend.score(read, sequence, goes_on) if len(read) else ()
            scores = _without(
                prompt.n_hidden, _judged(prompt.tokens, rows, self._top, self._n_behind)
            )
            found.append((scores, _text_of(self._backend.engine.llama, scores, prompt.text)))
        timings = {
            "prompt_n": sum(len(prompt.tokens) for prompt in self._prompts),
            "prompt_ms": 1000 * (monotonic() - began_s),
            "predicted_n": self._n_behind * len(self._prompts),
            "predicted_ms": 0.0,
            **costs(),
            "shared_steps": False,
        }
        return found, timings


def _judged(tokens: np.ndarray, parts: Iterable[np.ndarray], top: int, n_behind: int) -> Scores:
    """parts: logits float32 [m, n_vocab] of the tokens one after the other, all but the last one of
    them where n_behind is 0. The token behind them is the likeliest."""
    n = len(tokens) + n_behind
    scores = Scores(
        tokens=np.append(tokens, np.zeros(n_behind, np.int32)).astype(np.int32),
        logp=np.full(n, np.nan),
        likeliest=np.zeros((n, top), np.int32),
        likeliest_logp=np.full((n, top), np.nan),
        n_behind=n_behind,
    )
    at = 0
    for rows in parts:
        for row in rows:
            at += 1
            logp = log_softmax(row)
            if at == len(tokens):
                scores.tokens[at] = logp.argmax()
            scores.logp[at] = logp[scores.tokens[at]]
            if top:
                best = np.argpartition(logp, -top)[-top:]
                best = best[np.lexsort((best, -logp[best]))]
                scores.likeliest[at], scores.likeliest_logp[at] = best, logp[best]
    return scores


def _without(n_hidden: int, scores: Scores) -> Scores:
    """Without the first tokens."""
    return Scores(
        scores.tokens[n_hidden:],
        scores.logp[n_hidden:],
        scores.likeliest[n_hidden:],
        scores.likeliest_logp[n_hidden:],
        scores.n_behind,
    )


def _written(
    name: str, model: Model, found: Sequence[tuple[Scores, Text]], timings: dict[str, Any]
) -> Iterator[bytes]:
    """OpenAI's form of a completion, piece by piece: as one text it would take many times what the
    scores take."""
    n_prompt, n_behind = timings["prompt_n"], timings["predicted_n"]
    head = {
        "id": f"cmpl-{uuid4().hex}",
        "object": "text_completion",
        "created": int(time()),
        "model": name,
        "usage": {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_behind,
            "total_tokens": n_prompt + n_behind,
        },
        "timings": timings,
    }
    yield _json(head)[:-1] + b', "choices": ['
    for index, (scores, text) in enumerate(found):
        yield b", " * bool(index)
        yield from _choice(index, model, scores, text)
    yield b"]}"


def _choice(index: int, model: Model, scores: Scores, text: Text) -> Iterator[bytes]:
    tokens, logp = scores.tokens.tolist(), scores.logp.tolist()
    is_end = scores.n_behind and model.is_end(tokens[-1])
    choice = {"index": index, "text": text.whole, "finish_reason": "stop" if is_end else "length"}
    yield _json(choice)[:-1] + b', "logprobs": {"tokens": '
    yield from _listed(_name(model, token) for token in tokens)
    yield b', "token_logprobs": '
    yield from _listed(_number(value) for value in logp)
    yield b', "top_logprobs": '
    yield from _listed(
        _likeliest(model, *each)
        for each in zip(tokens, logp, scores.likeliest, scores.likeliest_logp, strict=True)
    )
    yield b', "text_offset": '
    yield from _listed(iter(text.offsets.tolist()))
    yield b"}}"


def _text_of(model: Model, scores: Scores, given: str | None) -> Text:
    """The text of what was scored. A tokenizer may have put a space before one that was given."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    n_tokens, n_chars = len(scores.tokens), 0
    text, offsets = [], np.zeros(n_tokens, np.int32)
    for at, token in enumerate(scores.tokens.tolist()):
        offsets[at] = n_chars
        text.append(decoder.decode(model.piece(token, special=True)))
        n_chars += len(text[-1])
    text.append(decoder.decode(b"", final=True))
    if given is None:
        return Text("".join(text), offsets)
    behind = "".join(text[n_tokens - scores.n_behind :])
    put_before = n_chars - len(behind) - len(given)
    return Text(given + behind, np.maximum(0, offsets - put_before))


def _likeliest(
    model: Model, token: int, logp: float, others: np.ndarray, their_logp: np.ndarray
) -> dict[str, float] | None:
    """The likeliest tokens and the one that is there, by what each is called."""
    if np.isnan(logp):
        return None
    named: dict[str, float] = {}
    for other, value in (*zip(others.tolist(), their_logp.tolist(), strict=True), (token, logp)):
        named.setdefault(_name(model, other), max(value, _LEAST))
    return named


def _name(model: Model, token: int) -> str:
    """A token's text; as OpenAI has it, its bytes where it is a part of a character."""
    piece = model.piece(token, special=True)
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _number(value: float) -> float | None:
    return None if np.isnan(value) else max(value, _LEAST)


def _listed(values: Iterator[Any]) -> Iterator[bytes]:
    """A JSON list, some of it at a time."""
    yield b"["
    separator = b""
    while some := list(islice(values, _PIECE_TOKENS)):
        yield separator + _json(some)[1:-1]
        separator = b", "
    yield b"]"


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")


def _asked(prompt: Any) -> list[str] | list[list[int]]:
    """The prompts of a request, in the four forms that OpenAI's field has."""
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


def _read(model: Model, asked: str | list[int], most: int) -> Prompt:
    """most: the tokens that a context has room for. Raises Refusal."""
    if isinstance(asked, str):
        # A text that begins with the begin token's own name gets no second one.
        bos = model.bos()
        begins = model.adds_bos() and not (bos and asked.startswith(bos))
        found = model.tokenize(asked, add_special=begins, parse_special=True)
        begin = model.tokenize("", add_special=True, parse_special=True)[:1] if begins else []
        n_hidden = int(bool(begin) and found[:1] == begin)
        prompt = Prompt(np.array(found, np.int32), n_hidden, asked)
    else:
        wrong = next((each for each in asked if not 0 <= each < model.n_vocab), None)
        if wrong is not None:
            raise Refusal(400, f"prompt has token {wrong}, and the model has {model.n_vocab}")
        prompt = Prompt(np.array(asked, np.int32))
    n_tokens = len(prompt.tokens)
    if n_tokens == prompt.n_hidden:
        raise Refusal(400, "a prompt is empty, and echo has nothing to score in it")
    if n_tokens > most:
        raise beyond_context(f"the prompt of {n_tokens} tokens", n_tokens, most)
    return prompt
