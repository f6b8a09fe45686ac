"""One answer of the runtime: its parts so far, its cost, and how to end it."""

from __future__ import annotations

import json
import os
import select
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import pairwise
from time import monotonic
from typing import Any

from gguf_tools.errors import ChangedError
from orchestrator.errors import ConfigError, NativeError
from orchestrator.events import GenerationStats, percentile
from orchestrator.native import NativeRequest

# Tokens that arrive faster than this are read together. A person cannot see the difference. Each
# time that the reading thread wakes up, it takes a core from the threads that compute.
REST_S = 0.04
# The number of fast parts after which the next ones are read together.
FAST = 2
_EVENT, _EVENT_END, _LAST = b"data: ", b"\n\n", b"[DONE]"


class Pace:
    """Decides how long the reader of an answer waits before it looks for new text again.

    While tokens arrive fast, the reader rests for REST_S seconds between two looks. Several tokens
    are then read together.
    """

    def __init__(self, now_s: Callable[[], float] = monotonic) -> None:
        """Begin without waits. now_s: returns the current time in seconds."""
        self._now_s = now_s
        self._n_fast, self._last_s = 0, now_s()

    @property
    def rests(self) -> bool:
        """Whether the reader of an answer should rest: wait REST_S seconds before it reads again.

        This is true while new text arrives more often than every REST_S seconds. After the rest,
        the reader gets several tokens at once.
        """
        return self._n_fast >= FAST

    def came(self) -> None:
        """Record that the reader of an answer got new text.

        If texts follow each other in less than REST_S seconds, `rests` becomes true. The reader
        should then wait REST_S seconds before each read, to get several tokens at once.
        """
        if self.rests:
            return
        now_s = self._now_s()
        self._n_fast = self._n_fast + 1 if now_s - self._last_s < REST_S else 0
        self._last_s = now_s

    def nothing(self) -> None:
        """Record that the reader of an answer looked for new text, and nothing had arrived.

        The reader then looks more often than new text arrives, so `rests` (whether the reader
        should pause before it looks again) becomes False.
        """
        self._n_fast = 0


class Answer:
    """The answer to one request, which a thread of its own computes.

    `Runtime.submit` makes the object. Iterate over it to get the events of the answer. A program
    with an event loop waits until fileno() is readable, and then calls take(). Call close when the
    rest of the answer is not needed.

    status: the HTTP status. is_stream: whether the answer is a stream of events. Both values are
    known after the first take() that returned text. error: the exception that ended the answer, or
    None.
    """

    def __init__(
        self,
        request: NativeRequest,
        answer: Callable[[Answer, int], None],
        costs: Callable[[Answer], dict[str, Any]],
        failure: Callable[[], str | None],
        tokens_done: Callable[[], float],
        stop_of: Callable[[], tuple[str, bool]],
        changed: Callable[[], str],
        prompt_remedy: str,
    ) -> None:
        """Start a thread that answers the request.

        - answer: computes the answer on that thread. It gets this object and a file descriptor, to
          which it writes a byte when text has arrived.
        - costs: returns the costs until now.
        - failure: returns why the last step failed.
        - tokens_done: returns how many tokens of the running step are computed.
        - stop_of: returns why the answer ended ("end", "word" or "limit") and whether the context
          was full.
        - changed: returns a sentence if a model file was written to, else "".
        - prompt_remedy: advice for a prompt that is too long.

        Raises OSError if no file descriptors or threads are left, and then closes the request.
        """
        self.error: BaseException | None = None
        self.is_shared = False  # whether other answers decoded at the same time
        self._request, self._costs, self._failure = request, costs, failure
        self._tokens_done, self._stop_of = tokens_done, stop_of
        self._changed, self._prompt_remedy = changed, prompt_remedy
        self._final: dict[str, Any] | None = None
        self._is_cancelled = False
        self._ended = threading.Event()
        self._timings: dict[str, Any] = {}
        self._progress: dict[str, Any] = {}  # how many tokens of the prompt are read
        try:
            self._from, self._to = os.pipe()
        except OSError:
            request.close()
            raise
        os.set_blocking(self._from, False)
        os.set_blocking(self._to, False)
        self._thread = threading.Thread(
            target=self._run, args=(answer,), name="answer", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError as error:
            request.close()
            self._close_pipe()
            raise OSError(0, "the system cannot start a thread for the answer") from error

    def _run(self, answer: Callable[[Answer, int], None]) -> None:
        try:
            answer(self, self._to)
        except BaseException as error:  # noqa: BLE001 - the reader of the answer gets it
            self.error = error
        finally:
            self._request.close()
            final: dict[str, Any] = {}
            with suppress(Exception):  # the costs of a store that failed may be unknown
                final = self._costs(self)
            self._final = final
            self._ended.set()
            with suppress(BlockingIOError, OSError):
                os.write(self._to, b"\0")

    @property
    def status(self) -> int:
        return self._request.status

    @property
    def is_stream(self) -> bool:
        return self._request.is_stream

    @property
    def n_left(self) -> int:
        """Number of bytes of a complete answer that `take` has not returned yet.

        The value is 0 while the answer is still being computed.
        """
        return self._request.n_left

    @property
    def has_ended(self) -> bool:
        """Whether the answer has ended, even if `take` has not returned all of it yet."""
        return self._ended.is_set()

    @property
    def is_cancelled(self) -> bool:
        """Whether cancel or close was called."""
        return self._is_cancelled

    def fileno(self) -> int:
        """Return a file descriptor that becomes readable when `take` may return new text."""
        return self._from

    def take(self) -> tuple[bytes, bool]:
        """Return (text since the last call, whether the answer is complete).

        The text of a stream consists of whole events. Any other answer is returned as one piece.
        """
        with suppress(BlockingIOError):
            os.read(self._from, 4096)
        has_ended = self._ended.is_set()
        text, _ = self._request.take()
        return text, has_ended

    def cancel(self) -> None:
        """Make the answer end soon. Safe in a signal handler and on any thread."""
        self._is_cancelled = True
        self._request.cancel()

    def close(self) -> None:
        """Cancel the answer, and wait until its thread has ended. Safe to call twice."""
        self.cancel()
        self._ended.wait()
        self._thread.join()
        self._close_pipe()

    def _close_pipe(self) -> None:
        for each in (self._from, self._to):
            if each >= 0:
                os.close(each)
        self._from = self._to = -1

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until `take` may return new text. Return False if timeout_s seconds have passed."""
        readable, _, _ = select.select([self._from], [], [], timeout_s)
        return bool(readable)

    def wait_for_end(self, timeout_s: float | None = None) -> bool:
        """Wait until the answer has ended. Return False if timeout_s seconds have passed before."""
        return self._ended.wait(timeout_s)

    def failure(self) -> str | None:
        """Return a sentence that says why the last step failed, or None if this is not known."""
        return self._failure()

    def tokens_done(self) -> float:
        """Return the progress of the running step as a number of tokens.

        The number grows with each computed layer, so it may be fractional.
        """
        return self._tokens_done()

    def costs(self) -> dict[str, Any]:
        """Return measurements such as the cache hit rate, the bytes read and the waiting time.

        The result maps names of fields of GenerationStats to values. While the answer is being
        computed, it covers the time until now.
        """
        return self._final if self._final is not None else self._costs(self)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the parsed JSON of each event of a stream.

        An answer that is not a stream gives one object. Raises ConfigError for a request that
        cannot be answered, and NativeError if computing failed. Raises ChangedError if a model file
        was written to, because the answer is wrong then. At the end, raises `error` if it is set.
        """
        pace = Pace()
        while True:
            text, is_all = self.take()
            if sentence := self._changed():
                raise ChangedError(sentence)
            if text:
                pace.came()
            else:
                pace.nothing()
            yield from self._events(text)
            if is_all:
                break
            if pace.rests:
                self._ended.wait(REST_S)
            elif not text:  # only a take that found nothing asks for a signal
                self.wait()
        if self.error is not None:
            raise self.error

    def _events(self, text: bytes) -> Iterator[dict[str, Any]]:
        if not self.is_stream:
            if text:
                yield self._record(json.loads(text))
            return
        for line in text.split(_EVENT_END):
            if line.startswith(b"error: "):
                line = _EVENT + line[len(b"error: ") :]
            if line.startswith(_EVENT + b"{"):
                yield self._record(json.loads(line[len(_EVENT) :]))

    def _record(self, event: dict[str, Any]) -> dict[str, Any]:
        """Store the timings and the prompt progress of an event, and return the event.

        Raises ConfigError or NativeError if the event reports an error.
        """
        if "error" in event:
            raise self._fault(event["error"])
        self._timings = event.get("timings") or self._timings
        self._progress = event.get("prompt_progress") or self._progress
        return event

    def _fault(self, error: Mapping[str, Any]) -> Exception:
        """Return the exception for an error that llama.cpp's server core reports.

        A wrong request or a prompt that is too long gives ConfigError. Other errors give
        NativeError.
        """
        message = str(error.get("message", ""))
        if error.get("type") == "exceed_context_size_error":
            n_prompt, n_ctx = error.get("n_prompt_tokens"), error.get("n_ctx")
            return ConfigError(
                f"the prompt has {n_prompt} tokens, the context holds {n_ctx}: "
                f"{self._prompt_remedy}"
            )
        if error.get("code") == 400:
            return ConfigError(message)
        unknown = "llama.cpp failed to compute the answer and gave no reason: try again"
        return NativeError(self._failure() or message or unknown)

    def stats(self, mode: str, policy: dict[str, Any]) -> GenerationStats:
        """Return the statistics of the answer, such as its speed and its cache hit rate.

        Call this after the end of the answer or after `cancel`. mode: the status line, a text that
        names the policy and the precisions in use. policy: figures that the policy reports about
        its own work. The result contains both arguments.
        """
        times_ms = [each / 1000 for each in self._request.token_times()]
        gaps_ms = [later - earlier for earlier, later in pairwise(times_ms)]
        costs, read = self.costs(), self._progress
        known, cached = read.get("processed", 0), read.get("cache", 0)
        finish = self._finish()
        n_tokens = int(self._timings.get("predicted_n", len(times_ms)))
        evaluated = int(self._timings.get("prompt_n", known - cached))
        return GenerationStats(
            ttft_ms=times_ms[0] if times_ms else float("nan"),
            tpot_ms_p50=percentile(gaps_ms, 50),
            tpot_ms_p99=percentile(gaps_ms, 99),
            tokens=n_tokens - (finish == "end"),  # the end token is none of the answer
            tokens_per_s=1000.0 * len(gaps_ms) / sum(gaps_ms) if sum(gaps_ms) else float("nan"),
            prompt_tokens=int(self._timings.get("cache_n", cached)) + evaluated,
            evaluated_tokens=evaluated,
            mode=mode,
            finish=finish,
            policy=policy,
            **{name: costs[name] for name in OWN_COSTS if name in costs},
        )

    def _finish(self) -> str:
        """Return the reason why the answer ended, as a value of GenerationStats.finish.

        "end": the model ended the answer. "stop": a stop word occurred. "length": the token limit
        was reached. "context": the context was full. "cancelled": the answer is not complete.
        """
        if not self._timings:
            return "cancelled"
        stop, is_full = self._stop_of()
        return "context" if is_full else {"word": "stop", "limit": "length"}.get(stop, "end")


# The fields of GenerationStats that are also in `timings` of a server's answer.
OWN_COSTS = (
    *("hit_rate", "prefill_hit_rate", "bytes_read", "wait_ms", "mix", "computed"),
    *("callback_us_p50", "kl_estimate", "kl_low", "limit_halved"),
    *("budget_bytes", "peak_rss_bytes"),
)
