"""`LLM`: a loaded model with methods. docs/python.md describes it.

It computes with a Runtime and checks requests with the code of the server, so it answers as
`moe-edge chat` and `moe-edge serve` do.
"""

from __future__ import annotations

import atexit
import difflib
import json
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Generic, Literal, TypeVar, overload

from gguf_tools.closing import Closing
from gguf_tools.process import trim_memory
from orchestrator.config import Config, Sampling
from orchestrator.errors import (
    ClosedError,
    ConfigError,
    MoeEdgeError,
    NativeError,
    PolicyError,
    ResourceError,
    sentence_of,
)
from orchestrator.events import GenerationStats, Phase
from orchestrator.library.images import with_images
from orchestrator.library.models import config_of, find_model
from orchestrator.library.process import check_process, closed, loading, opening
from orchestrator.library.progress import Bars
from orchestrator.library.results import ChatAnswer, Chunk, Completion, PlanSummary, Score
from orchestrator.library.worker import Stops, Worker
from orchestrator.native.llama import Model
from orchestrator.policy import POLICIES, Policy
from orchestrator.runtime.answer import Answer
from orchestrator.runtime.answering import Answering
from orchestrator.runtime.runtime import Runtime
from orchestrator.serve.bodies import Words
from orchestrator.serve.requests import request_schema, settle_probs, settle_request
from orchestrator.serve.scoring import Prompt, judged, read_prompt
from orchestrator.serve.served import SCORED_TOKENS, Served
from orchestrator.serve.settings import ServeSettings
from orchestrator.serve.wire import CHAT, COMPLETIONS, Refusal, Shaping, read_object, written
from orchestrator.settings import Settings

T = TypeVar("T")

# Texts for the user that no method returns.
_log = logging.getLogger("moe_edge")
_log.addHandler(logging.NullHandler())

# The server limits bodies to protect its memory from its clients. A program's own texts are only
# limited by the context.
_MOST_BODY_BYTES = 1 << 30
# While a call waits for the end of another thread's answer, it looks for that end this often.
_LOOK_S = 0.05
# Fields of a request that LLM's own parameters set, or that belong to `score`.
_OWN_FIELDS = ("messages", "prompt", "model", "stream", "tools", "echo", "n", "n_cmpl")


class Stream(Closing, Generic[T]):
    """An answer that comes in parts while it is computed. Iterate over it to get the parts.

    The answer ends early at `close`, at the end of a `with` block, and at Ctrl-C while a part is
    awaited.
    """

    def __init__(
        self, parts: Iterator[T], end: Callable[[], None], leave: Callable[[], None]
    ) -> None:
        """Wrap an iterator over the parts of an answer.

        `end` ends the answer and waits until the computation has stopped. `leave` ends it without
        waiting.
        """
        self._parts, self._end, self._leave = parts, end, leave
        self._is_closed = False

    def __iter__(self) -> Stream[T]:
        return self

    def __next__(self) -> T:
        if self._is_closed:
            raise StopIteration
        try:
            return next(self._parts)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the answer early, and wait until its computation has stopped. Safe to call twice."""
        self._is_closed = True
        self._end()

    def __del__(self) -> None:
        """End the answer soon, without waiting, because any thread may delete the object."""
        self._leave()


class LLM(Closing):
    """A loaded model. Use it in a `with` block, or call `close`.

    Any thread may call its methods. They compute one answer at a time, and other calls wait. Each
    method can raise MoeEdgeError. After `close` and in a forked process they raise ClosedError.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        ram: str | int | None = None,
        *,
        policy: str | type[Policy] | None = None,
        progress: bool | None = None,
        **settings: Any,
    ) -> None:
        """Load a model.

        `model` is a GGUF file, hf:OWNER/NAME[/FILE], or the name of a downloaded model. `ram` is
        the memory that the model may take, such as "8GiB". None means the memory that is free.
        `policy` is a name, "module:Class", or a subclass of Policy. `progress` tells whether to
        show progress bars. None means only in notebooks and terminals. `settings` are others of
        docs/settings.md, with sizes as texts or in bytes.

        Raises BudgetError if ram is too small, ConfigError for a wrong setting, and GGUFError or
        HubError for a model that cannot be read or downloaded. All are MoeEdgeErrors.
        """
        self._pid = os.getpid()
        check_process(ram)
        self._notes: list[str] = []
        self._stats: GenerationStats | None = None
        self._answer: Answer | None = None
        self._turn = threading.Lock()
        try:
            self._worker = Worker("moe-edge")
        except RuntimeError as error:
            raise ResourceError(
                "a thread for the model cannot be started: end other programs, or raise the limit "
                "on threads (such as ulimit -u)"
            ) from error
        opening(self._worker)
        given = {"ram": ram, "policy": policy, "remember": False, **settings}
        bars = Bars(progress)
        note = _noting(self._notes)
        try:
            self._runtime = self._call(
                partial(_opened, model, given, bars, note), discard=Runtime.close
            )
        except BaseException:
            closed(self._worker)
            self._worker.end()
            raise
        finally:
            bars.close()
        for sentence in (self._runtime.note, *POLICIES.faults):
            if sentence:
                note(sentence)
        words = Words.of(self._runtime.model)
        self._served = Served(self._runtime, ServeSettings(), words, note, _MOST_BODY_BYTES)
        self._closing = weakref.finalize(self, _finish, self._worker, self._runtime, self._pid)

    # Facts about the model.

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings and other remarks about the settings and this machine, one sentence each.

        An example is that a requested context was reduced to the model's training context. The
        command line prints the same sentences.
        """
        return tuple(self._notes)

    @property
    def plan(self) -> PlanSummary:
        """The settings and memory sizes that were chosen when the model was loaded.

        They include the policy, the precisions, the length of the context, and the bytes for each
        purpose.
        """
        return self._call(lambda: PlanSummary.of(self._runtime))

    @property
    def stats(self) -> GenerationStats | None:
        """Measurements of the latest answer that has ended, or None before the first answer.

        They include speed, cache hits, bytes read and the estimated quality loss.
        """
        return self._stats

    # Answers.

    @overload
    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        stream: Literal[False] = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        schema: Mapping[str, Any] | None = None,
        images: Sequence[Any] = (),
        **options: Any,
    ) -> ChatAnswer: ...

    @overload
    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        stream: Literal[True],
        tools: Sequence[Mapping[str, Any]] | None = None,
        schema: Mapping[str, Any] | None = None,
        images: Sequence[Any] = (),
        **options: Any,
    ) -> Stream[Chunk]: ...

    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        stream: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        schema: Mapping[str, Any] | None = None,
        images: Sequence[Any] = (),
        **options: Any,
    ) -> ChatAnswer | Stream[Chunk]:
        """Answer a conversation.

        Returns a ChatAnswer, or with `stream` a Stream of its parts (Chunk).

        `messages` are messages in OpenAI's format, or the text of one user message. `tools` are
        functions that the model may call, in OpenAI's format. The answer follows the JSON schema
        `schema` if it is given. `images` belong to the last message. Each is a path, the bytes of a
        PNG or JPEG file, or an image of Pillow. The content of a message may also be a list of
        texts and images. `options` are settings of the answer (such as max_tokens, temp, seed,
        think) and fields of /v1/chat/completions.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        self._check()
        data: dict[str, Any] = {"messages": with_images(messages, images, self._served.images)}
        if tools is not None:
            data["tools"] = list(tools)
        if schema is not None:
            form = {"name": "answer", "schema": dict(schema)}
            data["response_format"] = {"type": "json_schema", "json_schema": form}
        parts = self._answered(CHAT, data, stream, options)
        return _stream(parts) if stream else ChatAnswer.of(_whole(parts))

    @overload
    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        stream: Literal[False] = False,
        schema: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        stream: Literal[True],
        schema: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Stream[Chunk]: ...

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        stream: bool = False,
        schema: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Completion | Stream[Chunk]:
        """Continue a text without the model's chat template.

        Returns a Completion, or with `stream` a Stream of its parts (Chunk). `prompt` is a text or
        a list of token ids. The text follows the JSON schema `schema` if it is given. `options` are
        settings of the answer (such as max_tokens, temp, seed) and fields of /v1/completions.
        """
        data: dict[str, Any] = {"prompt": prompt if isinstance(prompt, str) else list(prompt)}
        if schema is not None:
            data["json_schema"] = dict(schema)
        parts = self._answered(COMPLETIONS, data, stream, options)
        return _stream(parts) if stream else Completion.of(_whole(parts))

    def score(self, text: str | Sequence[int]) -> Score:
        """Return the log-probability of each token of a text, as a Score.

        `text` is a text or a list of token ids. The model reads it as a prompt, not token by token.
        """
        self._check()
        asked = text if isinstance(text, str) else list(text)
        if not asked:
            raise ConfigError("the text is empty: there is nothing to score")
        stops = Stops()

        def scored() -> Score:
            prompt = read_prompt(self._runtime.vocabulary, asked, self._served.about.n_ctx)
            return _scored(self._runtime, prompt, stops)

        return self._call(scored, stops)

    def embed(self, text: str | Sequence[str]) -> Sequence[float]:
        """Always raise ConfigError: embeddings are not supported."""
        raise ConfigError(
            "moe-edge computes no embeddings: its models are trained to predict tokens. Use an "
            "embedding model, such as one of sentence-transformers"
        )

    # Tokens.

    def tokenize(self, text: str, special: bool = True) -> list[int]:
        """Return the token ids of a text.

        If `special` is True, the name of a control token in the text, such as <|im_end|>, becomes
        that token. The ids then also begin with the BOS token if the model uses one.
        """
        return self._call(lambda: self._runtime.vocabulary.tokenize(text, special, special))

    def detokenize(self, tokens: Sequence[int], special: bool = False) -> str:
        """Return the text of token ids.

        If `special` is True, it includes the names of control tokens.
        """
        self._check()
        n_vocab = self._served.about.n_vocab
        wrong = next((each for each in tokens if not 0 <= each < n_vocab), None)
        if wrong is not None:
            raise ConfigError(f"token {wrong} does not exist: token ids are 0 to {n_vocab - 1}")

        def text() -> str:
            pieces = (self._runtime.vocabulary.piece(each, special) for each in tokens)
            return b"".join(pieces).decode("utf-8", "replace")

        return self._call(text)

    def close(self) -> None:
        """End all answers and free the model. Safe to call twice."""
        if os.getpid() != self._pid or not self._closing.alive:
            return
        self._closing.detach()
        closed(self._worker)
        # If Ctrl-C interrupts the wait below, the process waits for the worker at its end.
        atexit.register(self._worker.join)
        self._runtime.stop()
        call = self._worker.post(self._runtime.close)
        self._worker.end()
        call.ended.wait()
        self._worker.join()
        atexit.unregister(self._worker.join)
        self._answer = None
        del self._runtime, self._served
        trim_memory()  # the closed objects refer to each other, so they are not freed yet
        if call.error is not None:
            raise call.error

    # Private methods.

    def _check(self) -> None:
        """Raise ClosedError if the model can no longer be used in this process."""
        if os.getpid() != self._pid:
            raise ClosedError(
                f"this model was opened by process {self._pid}, of which this process is a fork: "
                "open a model in each process, and start them with multiprocessing's spawn"
            )
        closing = getattr(self, "_closing", None)
        if closing is not None and not closing.alive:
            raise ClosedError("this model is closed: open it again with LLM(...)")

    def _call(
        self,
        function: Callable[[], T],
        stop: Callable[[], object] = lambda: None,
        discard: Callable[[T], object] | None = None,
    ) -> T:
        """Run a function on the worker's thread, and return its result.

        If the wait is interrupted, `stop` is called to end the function, and `discard` frees its
        result. Errors are raised as MoeEdgeError, also a Refusal or an OSError.
        """
        self._check()
        try:
            return self._worker.call(function, stop, discard)
        except Refusal as error:
            raise ConfigError(error.message) from None
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            raise ResourceError(f"{where}{error.strerror or error}") from error

    def _answered(
        self, route: str, data: dict[str, Any], stream: bool, options: Mapping[str, Any]
    ) -> _Parts:
        """Submit a request to the runtime when no other answer is running, and return its parts.

        `options` are settings of the answer and further fields of the request.
        """
        self._check()
        request = {**data, **self._fields(route, options), "stream": stream}

        def submitted() -> _Parts:
            checked = read_object(_as_json(request))
            changes = settle_request(route, checked, 0, self._served)
            settings = self._served.settings_for(changes)
            shaping = settle_probs(route, checked, self._served.about.n_ctx)
            return self._submit(route, written(checked), settings, shaping)

        while True:
            before = self._answer
            while before is not None and not before.wait_for_end(_LOOK_S):
                self._check()
            with self._turn:
                if self._answer is before:
                    made = self._call(submitted, discard=_Parts.close)
                    self._answer = made.answer
                    return made

    def _submit(
        self, route: str, body: bytes, settings: Settings | None, shaping: Shaping | None
    ) -> _Parts:
        runtime = self._runtime
        runtime.policy_error = None
        answer = runtime.submit(body, route, settings=settings)

        def ended(answer: Answer) -> None:
            stats = runtime.stats()
            self._stats = answer.stats(stats.mode, stats.policy)

        return _Parts(self, answer, shaping, ended)

    def _fields(self, route: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a request for the options of a call.

        Options that are absent get the values of the model's settings. Raises ConfigError for
        unknown options.
        """
        sampling = Sampling.declared()
        known = {*sampling, "max_tokens", "think", *request_schema(route)["properties"]}
        for name in options:
            if name not in known or name in _OWN_FIELDS:
                near = difflib.get_close_matches(name, known - {*_OWN_FIELDS}, 1, 0.5)
                hint = f"; did you mean '{near[0]}'?" if near else ""
                raise ConfigError(f"unknown option '{name}'{hint}")
        config = self._runtime.config
        given = {name: value for name, value in options.items() if name in sampling}
        if isinstance(given.get("stop"), str):
            given["stop"] = (given["stop"],)
        elif "stop" in given:
            given["stop"] = tuple(given["stop"] or ())
        own = {name: getattr(config, name) for name in sampling}
        fields = Sampling(**{**own, **given}).fields()
        think = options.get("think", config.think)
        limit = options.get("max_tokens")
        fields["max_tokens"] = limit if limit is not None else config.max_tokens or -1
        if think is not None:
            Config.declared()["think"].check(think)
            fields["chat_template_kwargs"] = {"enable_thinking": think == "on"}
        handled = {*sampling, "max_tokens", "think"}
        return fields | {k: v for k, v in options.items() if k not in handled}


class _Parts(Iterator[dict[str, Any]]):
    """An iterator over the parts of an answer, as dicts in the server's JSON format.

    An answer that is not streamed has one part. Call `close` at the end.
    """

    def __init__(
        self,
        llm: LLM,
        answer: Answer,
        shaping: Shaping | None,
        ended: Callable[[Answer], None],
    ) -> None:
        """Prepare the iteration over `answer`, whose parts `shaping` converts.

        `ended` is called once, on the worker's thread, when the answer has ended.
        """
        self.answer = answer
        self._llm, self._runtime = llm, llm._runtime
        self._shaping, self._ended = shaping, ended
        self._events = iter(answer)
        self._is_closed = False

    def __next__(self) -> dict[str, Any]:
        self._llm._check()
        try:
            found = next(self._events)
        except NativeError as error:
            cause = self._runtime.policy_error
            if cause is not None:
                raise PolicyError(sentence_of(cause)) from cause
            raise error
        if self._shaping is not None:
            found = json.loads(self._shaping.shape(json.dumps(found).encode(), False))
        if found.get("timings"):
            found["timings"] = {**self.answer.costs(), **found["timings"]}
        return found

    def close(self) -> None:
        """End the answer, and wait until its computation has stopped. Safe to call twice."""
        if self._begin_to_close():
            try:
                self._llm._call(self._close)
            except ClosedError:
                self.answer.close()

    def leave(self) -> None:
        """Cancel this answer, and return without waiting until its computation has stopped."""
        if not self._begin_to_close():
            return
        if self._llm._closing.alive:
            self._llm._worker.post(self._close)
        else:  # the answer has ended, and nothing is left to wait for
            self.answer.close()

    def _begin_to_close(self) -> bool:
        """Cancel the answer, and return whether it still has to be closed.

        Returns False if it is already closed. Also returns False in a forked process, because the
        answer then belongs to the parent process.
        """
        if self._is_closed or os.getpid() != self._llm._pid:
            return False
        self._is_closed = True
        self.answer.cancel()
        return True

    def _close(self) -> None:
        self.answer.close()
        with suppress(MoeEdgeError, OSError):
            self._ended(self.answer)


def _whole(parts: _Parts) -> dict[str, Any]:
    """Return the only part of an answer that is not streamed, and close the answer."""
    try:
        (found,) = parts
    finally:
        parts.close()
    return found


def _stream(parts: _Parts) -> Stream[Chunk]:
    return Stream(map(Chunk.of, parts), parts.close, parts.leave)


def _as_json(request: dict[str, Any]) -> bytes:
    """Return a request as JSON. Raises ConfigError for values that JSON does not have."""
    try:
        return written(request)
    except TypeError as error:
        raise ConfigError(
            f"the request (messages, prompt, tools or other options) has a value that cannot be "
            f"written as JSON: {error}"
        ) from None


def _opened(
    model: str | os.PathLike[str],
    given: Mapping[str, Any],
    bars: Bars,
    note: Callable[[str], None],
) -> Runtime:
    """Find the model, plan its memory, load it, and return its runtime.

    Call this on the worker's thread. `given` holds the settings, and `note` gets messages for the
    user. Raises MoeEdgeError and OSError if the model cannot be loaded.
    """
    path = find_model(os.fspath(model), note, bars.download)
    config = config_of(path, given)
    loading()
    answering = Answering(grammars=True, scored=SCORED_TOKENS, images=True)
    return Runtime.open(config, bars.stage, answering, say=note)


def _noting(notes: list[str]) -> Callable[[str], None]:
    """Return a function that appends a sentence for the user to `notes` and logs it.

    The function holds no LLM. The runtime keeps the function, and an LLM whose runtime held it
    would never be garbage collected.
    """

    def note(sentence: str) -> None:
        notes.append(sentence)
        _log.info("%s", sentence)

    return note


def _finish(worker: Worker, runtime: Runtime, pid: int) -> None:
    """Free a model that the program did not close.

    This is called when the model is garbage collected and when the process `pid` ends. It does
    nothing in other processes.
    """
    if os.getpid() != pid:
        return
    closed(worker)
    runtime.stop()
    worker.post(runtime.close)
    worker.end()
    # The garbage collector may run on a thread for which the runtime waits.
    if threading.current_thread() is threading.main_thread():
        worker.join()


def _scored(runtime: Runtime, prompt: Prompt, stops: Stops) -> Score:
    """Return the log-probabilities of a prompt. `stops` can end the evaluation soon."""
    read = prompt.tokens[:-1].tolist()
    try:
        with runtime.evaluator() as evaluator, stops.including(evaluator.cancel):
            rows = evaluator.eval_each(read, 0, Phase.PREFILL) if read else ()
            found = judged(prompt, rows, 0, 0)
    except (MoeEdgeError, OSError):
        raise
    except Exception as error:
        raise PolicyError(sentence_of(error)) from error
    tokens = found.tokens.tolist()
    return Score(
        tuple(tokens),
        tuple(_text(runtime.vocabulary, each) for each in tokens),
        tuple(found.logp.tolist()),
    )


def _text(vocabulary: Model, token: int) -> str:
    return vocabulary.piece(token, special=True).decode("utf-8", "replace")
