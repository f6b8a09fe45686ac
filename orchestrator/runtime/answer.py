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

# Tokens that come faster than this are read together. A reader cannot see the difference, and each
# time that it wakes it takes a core from the threads that compute.
REST_S = 0.04
# The number of fast parts after which the next ones are read together.
FAST = 2
_EVENT, _EVENT_END, _LAST = b"data: ", b"\n\n", b"[DONE]"


class Pace:
    """Decides when a reader of an answer should look for more.

    It waits long enough that fast tokens are read together.
    """

    def __init__(self, now_s: Callable[[], float] = monotonic) -> None:
        """now_s: the clock."""
        self._now_s = now_s
        self._n_fast, self._last_s = 0, now_s()

    @property
    def rests(self) -> bool:
        """Whether to wait REST_S before the next look."""
        return self._n_fast >= FAST

    def came(self) -> None:
        """Something was read. After a rest, tokens stay fast."""
        if self.rests:
            return
        now_s = self._now_s()
        self._n_fast = self._n_fast + 1 if now_s - self._last_s < REST_S else 0
        self._last_s = now_s

    def nothing(self) -> None:
        """Nothing was there after a rest."""
        self._n_fast = 0


class Answer:
    """A request that is being answered on a thread of its own, made by `Runtime.submit`.

    Iterate over it for the events of a stream. A program with an event loop waits until fileno()
    can be read, and calls take(). Call close when no more of it is wanted.

    status: the HTTP status and is_stream: whether the answer comes as events; both are known once
    something was taken. error: why the runtime could not answer, once the answer has ended.
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
        too_long: str,
    ) -> None:
        """answer: runs the request to its end on the answer's thread.

        Its arguments are the answer and a file descriptor, to which it writes when something has
        come. costs: returns the costs until now. failure: returns why the last step failed.
        tokens_done: returns the computed tokens of the running step. stop_of: returns, after the
        end, the cause of it ("end", "word" or "limit") and whether the context was full. changed:
        returns a sentence if a model file was written to, else "". too_long: ends the sentence
        about a prompt that does not fit.

        Raises OSError if no file descriptors or threads are left; the request is closed then.
        """
        self.error: BaseException | None = None
        self.is_shared = False  # whether other answers decoded at the same time
        self._request, self._costs, self._failure = request, costs, failure
        self._tokens_done, self._stop_of = tokens_done, stop_of
        self._changed, self._too_long = changed, too_long
        self._final: dict[str, Any] | None = None
        self._is_cancelled = False
        self._ended = threading.Event()
        self._timings: dict[str, Any] = {}
        self._progress: dict[str, Any] = {}  # of the prompt
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
            raise OSError(0, "no thread can be started") from error

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
        """Bytes of an ended answer that were not taken yet."""
        return self._request.n_left

    @property
    def has_ended(self) -> bool:
        """Whether the work has ended, taken or not."""
        return self._ended.is_set()

    @property
    def is_cancelled(self) -> bool:
        """Whether cancel or close was called."""
        return self._is_cancelled

    def fileno(self) -> int:
        """Return a file descriptor that can be read when take may have something new."""
        return self._from

    def take(self) -> tuple[bytes, bool]:
        """Return the parts since the last call, and whether the answer is complete.

        A stream comes as whole events; any other answer comes as one part.
        """
        with suppress(BlockingIOError):
            os.read(self._from, 4096)
        has_ended = self._ended.is_set()
        text, _ = self._request.take()
        return text, has_ended

    def cancel(self) -> None:
        """End the answer soon; safe in a signal handler and from any thread."""
        self._is_cancelled = True
        self._request.cancel()

    def close(self) -> None:
        """End the answer, and wait for that. Safe to call twice. Does not raise."""
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
        """Wait until something may have come; False if nothing has within timeout_s."""
        readable, _, _ = select.select([self._from], [], [], timeout_s)
        return bool(readable)

    def wait_for_end(self, timeout_s: float | None = None) -> bool:
        """Wait until the work has ended, read or not; False if it has not within timeout_s."""
        return self._ended.wait(timeout_s)

    def failure(self) -> str | None:
        """Return why a step failed, in a sentence; None if the reason is not known."""
        return self._failure()

    def tokens_done(self) -> float:
        """Return how many tokens of the running step are computed, by its layers."""
        return self._tokens_done()

    def costs(self) -> dict[str, Any]:
        """Return the fields of GenerationStats that the store knows, until now or the end."""
        return self._final if self._final is not None else self._costs(self)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the JSON of each event of a stream, or that of an answer which is none.

        Raises what error says, NativeError or ConfigError for an answer that failed, and
        ChangedError if a model file was written to, because the answer is wrong then.
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
                yield self._heard(json.loads(text))
            return
        for line in text.split(_EVENT_END):
            if line.startswith(b"error: "):
                line = _EVENT + line[len(b"error: ") :]
            if line.startswith(_EVENT + b"{"):
                yield self._heard(json.loads(line[len(_EVENT) :]))

    def _heard(self, event: dict[str, Any]) -> dict[str, Any]:
        """Keep what an event says of the whole answer. Raises for an error."""
        if "error" in event:
            raise self._fault(event["error"])
        self._timings = event.get("timings") or self._timings
        self._progress = event.get("prompt_progress") or self._progress
        return event

    def _fault(self, error: Mapping[str, Any]) -> Exception:
        """Return the exception for an error that the core reports."""
        message = str(error.get("message", ""))
        if error.get("type") == "exceed_context_size_error":
            return ConfigError(
                f"the prompt has {error.get('n_prompt_tokens')} tokens, the context holds "
                f"{error.get('n_ctx')}{self._too_long}"
            )
        if error.get("code") == 400:
            return ConfigError(message)
        return NativeError(self._failure() or message or "llama.cpp failed to evaluate")

    def stats(self, mode: str, policy: dict[str, Any]) -> GenerationStats:
        """Return what an answer cost that was read to its end or cancelled.

        mode and policy: the status line, and the policy's report.
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
        """How the answer ended, as GenerationStats.finish."""
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
