"""Ctrl-C: when it may end what runs, and how it gets there. The only place that handles SIGINT.

Python runs the handler of a signal between any two instructions of the main thread. An exception
that it raises in a function which C called has nobody above it: ctypes prints it, and what the
function had to decide is lost. The same holds for __del__, and C code that imports a module makes
another error of it. So the handler here raises KeyboardInterrupt only where somebody gets it.
Elsewhere the interrupt waits: for the end of the call (``held``), or for a moment.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from types import CodeType, FrameType, FunctionType
from typing import Any, TypeVar

STATUS = 130
# A second Ctrl-C ends the process as it stands; nobody means that within so short a time.
FORCE_AFTER_S = 1.0
_AGAIN_S = 0.01
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
    """What the process knows of interrupts. asked_s: when one came that nobody has got over."""

    def __init__(self) -> None:
        self.listening = False
        self.asked_s: float | None = None
        self.waiting = False
        self.stops: list[Callable[[], None]] = []
        self.last_file: str | None = None
        self.over = False


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
    held, too."""
    if _state.waiting and _here.is_main:
        _state.waiting = False
        _forget_unless_listening()
        raise KeyboardInterrupt


def hand_over(error: BaseException) -> None:
    """What a function that C called cannot raise: the block of held that the thread is in does."""
    _here.raised = error


def forget() -> None:
    """Whoever caught KeyboardInterrupt goes on: the next one is a first one again."""
    _state.asked_s, _state.waiting = None, False


class held:
    """A block in which no interrupt is raised. One that comes meanwhile is raised at its end, in
    the place of what the block raises; so is what callbacks hand over, and what ctypes would print.

    For calls of C that call Python back, and for what must not be left half done. In other threads
    than the main one, which get no signals, it is for the errors alone.
    """

    def __init__(self) -> None:
        self._before: tuple[Any, Any] | None = None

    def __enter__(self) -> None:
        if _here.depth == 0 and _here.is_main and not _state.listening:
            self._before = _install()
        _here.depth += 1

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        _here.depth -= 1
        if self._before is not None:
            _put_back(self._before)
        if _here.depth:
            return
        raised, _here.raised = _here.raised, None
        check()
        if raised is not None and error is None:
            raise raised


@contextmanager
def calling(stop: Callable[[], None]) -> Iterator[None]:
    """In the block an interrupt calls stop, in the place of all else. It may come at any moment."""
    before = None if _state.listening else _install()
    _state.stops.append(stop)
    try:
        yield
    finally:
        _state.stops.pop()
        if before is not None:
            _put_back(before)


def leave_at_once() -> None:
    """From here on an interrupt ends the process, quietly: it has not begun anything. An interrupt
    that the process was started to ignore stays ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


@contextmanager
def listening() -> Iterator[None]:
    """Lets an interrupt end the block by KeyboardInterrupt, at its end at the latest. What a
    process that leaves at once does behind the block is not interrupted: its work is done."""
    before = _install()
    if before is None:
        yield
        return
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
        _state.last_file = None
        forget()
        signal.setitimer(signal.ITIMER_REAL, 0)
        handler, hook = before
        _put_back((signal.SIG_IGN if handler is _leave else handler, hook))


def ends_with(path: Path) -> None:
    """Says which file is the result of the block of listening: once it has its name, nothing is
    left to interrupt."""
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
    now_s = monotonic()
    if _state.asked_s is not None:
        if now_s > _state.asked_s + FORCE_AFTER_S:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)
        return
    _state.asked_s, _state.waiting = now_s, True
    _raise_or_wait(frame)


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
    if isinstance(error, KeyboardInterrupt) and _here.is_main:
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
