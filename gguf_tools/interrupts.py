"""Ctrl-C: when it may end what runs, and how it gets there. The only place that handles SIGINT,
SIGTERM and SIGHUP.

Python runs the handler of a signal between any two instructions of the main thread. An exception
that it raises in a function which C called has nobody above it: ctypes prints it, and what the
function had to decide is lost. The same holds for __del__, and C code that imports a module makes
another error of it. So the handler here raises KeyboardInterrupt only where somebody gets it.
Elsewhere the interrupt waits: for the end of the call (``held``), or for a moment.

SIGTERM and a hang-up end a command in the same way, by SystemExit, which nobody gets over.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from types import CodeType, FrameType, FunctionType
from typing import Any, TypeVar

STATUS = 130
_ENDING = (signal.SIGTERM, signal.SIGHUP)
# A second Ctrl-C ends the process as it stands; nobody means that within so short a time.
FORCE_AFTER_S = 1.0
_AGAIN_S = 0.01
# After SIGTERM, how long a command with last work waits for the main thread to return from C.
LEAVE_AFTER_S = 1.5
_IMPORTING = "<frozen importlib"

F = TypeVar("F", bound=Callable[..., Any])

_called_from_c: set[CodeType] = set()


class _Here(threading.local):
    """What one thread is in: how many blocks of held, and what its callbacks could not say."""

    def __init__(self) -> None:
        self.depth = 0
        self.raised: BaseException | None = None
        self.is_main = threading.current_thread() is threading.main_thread()


class _State:
    """What the process knows of interrupts. asked_s: when one came that nobody has got over.
    ending: the number of the signal that ends the process, if one came. leaves: behind listening,
    the process does nothing but end."""

    def __init__(self) -> None:
        self.listening = False
        self.asked_s: float | None = None
        self.waiting = False
        self.ending: int | None = None
        self.stops: list[Callable[[], None]] = []
        self.ends: Callable[[], None] | None = None
        self.last_work: list[Callable[[], None]] = []
        self.last_file: str | None = None
        self.over = False
        self.leaves = False


_here = _Here()
_state = _State()


def called_from_c(function: F) -> F:
    """Marks a function that C code calls: no interrupt is raised in it, nor in what it calls. It
    should ask ``asked``, and fail then."""
    assert isinstance(function, FunctionType)
    _called_from_c.add(function.__code__)
    return function


def asked() -> bool:
    """Whether an interrupt came that has not ended what it is to end. For any thread: work that
    takes long should stop."""
    return _state.asked_s is not None


def check() -> None:
    """A safe point of the main thread: raises KeyboardInterrupt where one waits, in blocks of
    held, too; SystemExit where the process is to end."""
    if _state.waiting and _here.is_main:
        _state.waiting = False
        if _state.ending is not None:
            raise SystemExit(128 + _state.ending)
        _forget_unless_listening()
        raise KeyboardInterrupt


def hand_over(error: BaseException) -> None:
    """What a function that C called cannot raise: the block of held that the thread is in does."""
    _here.raised = error


def forget() -> None:
    """Whoever caught KeyboardInterrupt goes on: the next one is a first one again."""
    if _state.ending is None:
        _state.asked_s, _state.waiting = None, False


class held:
    """A block in which no interrupt is raised. One that comes meanwhile is raised at its end, in
    the place of what the block raises; so is what callbacks hand over, and what ctypes would print.

    For calls of C that call Python back, and for what must not be left half done. In other threads
    than the main one, which get no signals, it is for the errors alone.

    stop: called as soon as a signal arrives, from another thread, because Python runs no handler
    while the main thread is in C. It has to make the C call return soon. Only the outermost block
    of the main thread uses it.
    """

    def __init__(self, stop: Callable[[], None] | None = None) -> None:
        self._before: tuple[Any, Any] | None = None
        self._stop = stop

    def __enter__(self) -> None:
        if _here.depth == 0 and _here.is_main:
            if not _state.listening:
                self._before = _install()
            if self._stop is not None:
                _watch.begin(self._stop)
        _here.depth += 1

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        _here.depth -= 1
        if _here.depth == 0 and _here.is_main and self._stop is not None:
            _watch.end()
        if self._before is not None:
            _put_back(self._before)
        if _here.depth:
            return
        raised, _here.raised = _here.raised, None
        check()
        if raised is not None and error is None:
            raise raised


class _Watch:
    """Reacts to signals while the main thread is in C.

    Python's own signal handler, in C, writes the signal's number into a pipe. A thread reads it
    there and does what the handler will do later, as far as it stops what runs.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stop: Callable[[], None] | None = None
        self._n_begun = 0
        self._writer = self._before = -1

    def begin(self, stop: Callable[[], None]) -> None:
        """Calls stop when a signal arrives that this module handles, until end is called."""
        if self._writer < 0:
            reader, self._writer = os.pipe()
            os.set_blocking(self._writer, False)
            threading.Thread(target=self._run, args=(reader,), name="signals", daemon=True).start()
        self._stop = stop
        self._n_begun += 1
        self._before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)

    def end(self) -> None:
        """Calls stop no more: after this has returned, no call of it is running."""
        signal.set_wakeup_fd(self._before)
        with self._lock:
            self._stop = None

    def _run(self, reader: int) -> None:
        while True:
            for number in os.read(reader, 64):
                with self._lock:
                    if self._stop is not None:
                        self._react(number, self._stop)

    def _react(self, number: int, stop: Callable[[], None]) -> None:
        handler = signal.getsignal(number)
        if handler is _on_interrupt:
            (_state.stops[-1] if _state.stops else stop)()
        elif handler is _on_ending:
            (_state.ends or stop)()
            if _state.last_work:
                leave = threading.Timer(LEAVE_AFTER_S, self._leave, (number, self._n_begun))
                leave.daemon = True
                leave.start()

    def _leave(self, number: int, n_begun: int) -> None:
        """Ends the process if the main thread is still in the C call in which the signal came."""
        with self._lock:
            if self._stop is None or self._n_begun != n_begun:
                return
        for work in reversed(_state.last_work):
            with suppress(Exception):
                work()
        os._exit(128 + number)


_watch = _Watch()


@contextmanager
def leaving(last_work: Callable[[], None]) -> Iterator[None]:
    """In the block, SIGTERM and SIGHUP end the process even if a call of C does not return soon.

    last_work: called in another thread before the process ends in that way, the innermost block's
    first. It has to return soon. Other endings do not call it.
    """
    _state.last_work.append(last_work)
    try:
        yield
    finally:
        _state.last_work.remove(last_work)


@contextmanager
def calling(stop: Callable[[], None], ending: bool = False) -> Iterator[None]:
    """In the block an interrupt calls stop, in the place of all else. It may come at any moment.
    Within a block of held that has a stop, another thread calls it once more, and before that.
    ending: so do SIGTERM and SIGHUP, where listening would let them end the process."""
    before = None if _state.listening else _install()
    _state.stops.append(stop)
    ends_before, _state.ends = _state.ends, stop if ending else _state.ends
    try:
        yield
    finally:
        _state.ends = ends_before
        _state.stops.pop()
        if before is not None:
            _put_back(before)


def leave_at_once() -> None:
    """From here on an interrupt ends the process, quietly: it has not begun anything. An interrupt
    that the process was started to ignore stays ignored."""
    _state.leaves = True
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


@contextmanager
def listening() -> Iterator[None]:
    """Lets an interrupt end the block by KeyboardInterrupt, at its end at the latest. What a
    process that leaves at once does behind the block is not interrupted: its work is done. SIGTERM
    and SIGHUP end it by SystemExit, where nobody else handles or ignores them."""
    before, hook = _install(), sys.unraisablehook
    ending = [number for number in _ENDING if _install_ending(number)]
    if before is None and not ending:
        yield
        return
    sys.unraisablehook = _on_unraisable
    _state.listening = True
    try:
        check()
        yield
        check()
    except Exception:
        check()
        raise
    finally:
        _state.listening = _state.over = False
        _state.last_file = _state.ending = None
        forget()
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number in ending:
            signal.signal(number, signal.SIG_IGN if _state.leaves else signal.SIG_DFL)
        sys.unraisablehook = hook
        if before is not None:
            _put_back((signal.SIG_IGN if _state.leaves else before[0], hook))


def ends_with(path: Path) -> None:
    """Says which file is the result of the block of listening: once it has its name, nothing is
    left to interrupt. Outside of such a block nobody would hear again, so it says nothing there."""
    if _state.listening:
        _state.last_file = os.path.abspath(path)


def rename(part: Path, path: Path) -> None:
    """Gives a file its name. Raises OSError, or KeyboardInterrupt before it has the name."""
    is_last = os.path.abspath(path) == _state.last_file
    with held():
        check()
        os.replace(part, path)
        if is_last:
            _state.over = True
            forget()


def _install() -> tuple[Any, Any] | None:
    """The handlers that were there; None where an interrupt is ignored, or another's."""
    if not _here.is_main or signal.getsignal(signal.SIGINT) not in (
        signal.default_int_handler,
        _leave,
    ):
        return None
    handler = signal.signal(signal.SIGINT, _on_interrupt)
    hook, sys.unraisablehook = sys.unraisablehook, _on_unraisable
    return handler, hook


def _install_ending(number: int) -> bool:
    """Whether a signal that would end the process ends the block of listening."""
    if not _here.is_main or signal.getsignal(number) is not signal.SIG_DFL:
        return False
    signal.signal(number, _on_ending)
    return True


def _put_back(before: tuple[Any, Any]) -> None:
    sys.unraisablehook = before[1]
    signal.signal(signal.SIGINT, before[0])


def _leave(_signum: int, _frame: FrameType | None) -> None:
    os._exit(STATUS)


def _on_interrupt(_signum: int, frame: FrameType | None) -> None:
    if _state.over:
        return
    if _state.stops:
        _state.stops[-1]()
        return
    if not _comes_again(signal.SIGINT):
        _state.waiting = True
        _raise_or_wait(frame)


def _on_ending(number: int, frame: FrameType | None) -> None:
    if _state.ends is not None:
        _state.ends()
    elif not _state.over and not _comes_again(number):
        _state.ending, _state.waiting = number, True
        _raise_or_wait(frame)


def _comes_again(number: int) -> bool:
    """Whether one is on its way already; one that comes later ends the process as it stands."""
    now_s = monotonic()
    if _state.asked_s is None:
        _state.asked_s = now_s
        return False
    if now_s > _state.asked_s + FORCE_AFTER_S:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
    return True


def _raise_or_wait(frame: FrameType | None) -> None:
    # Without listening, this handler is there in blocks of held alone.
    if _here.depth or not _state.listening:
        return
    if _gets_lost(frame):
        _come_again()
        return
    check()


def _gets_lost(frame: FrameType | None) -> bool:
    """Whether what is raised here would not come out where somebody catches it."""
    while frame is not None:
        code = frame.f_code
        if (
            code in _called_from_c
            or code.co_name == "__del__"
            or code.co_filename.startswith(_IMPORTING)
        ):
            return True
        frame = frame.f_back
    return False


def _come_again() -> None:
    signal.signal(signal.SIGALRM, _on_alarm)
    signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)


def _on_alarm(_signum: int, frame: FrameType | None) -> None:
    if _state.waiting:
        _raise_or_wait(frame)


def _on_unraisable(what: Any) -> None:
    """In the place of sys.unraisablehook: what Python would print and forget."""
    error = what.exc_value
    if isinstance(error, (KeyboardInterrupt, SystemExit)) and _here.is_main:
        _state.waiting = True
        if _state.listening:
            _come_again()
    elif _here.depth and error is not None and "ctypes callback" in (what.err_msg or ""):
        _here.raised = error
    else:
        sys.__unraisablehook__(what)


def _forget_unless_listening() -> None:
    if not _state.listening:
        forget()
