"""Handle Ctrl-C and termination signals.

This is the only module that handles SIGINT, SIGTERM and SIGHUP.

Python can run a signal handler between any two instructions of the main thread. An exception that
the handler raises inside a function called from C cannot propagate: ctypes prints it, and the
function's return value is lost. Exceptions in `__del__` are lost in the same way, and C code that
imports a module turns them into another error. This module therefore raises KeyboardInterrupt only
at points from which it can propagate. In all other cases the interrupt stays pending until the C
call ends (`held`), or the handler tries again after 10 ms.

SIGTERM and SIGHUP follow the same path, but raise SystemExit.

Other threads get no signals. `cancellable` lets another thread stop their work.
"""

from __future__ import annotations

import os
import select
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
# A second Ctrl-C kills the process, unless it comes sooner than this after the first one. Signals
# in quick succession count as one request.
FORCE_AFTER_S = 1.0
_RETRY_S = 0.01
# How long the main thread may take to return from C after SIGTERM within a `leaving` block.
LEAVE_AFTER_S = 1.5
_IMPORTING = "<frozen importlib"

F = TypeVar("F", bound=Callable[..., Any])

_called_from_c: set[CodeType] = set()


class _ThreadState(threading.local):
    """The state of one thread that decides how it handles interrupts.

    depth: number of nested `held` blocks, in which no interrupt is raised.
    raised: an error of a callback, to be raised at the end of the outermost `held` block.
    cancelled: function that returns whether the work of this thread is cancelled, or None. It is
        set in a `cancellable` block until that block's KeyboardInterrupt is raised.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.raised: BaseException | None = None
        self.cancelled: Callable[[], bool] | None = None
        self.is_main = threading.current_thread() is threading.main_thread()


class _State:
    """The state of the process that decides how it handles interrupts.

    listening: whether a `listening` block is active, in which interrupts raise exceptions.
    asked_s: time of the pending or latest interrupt, or None after it was handled.
    waiting: whether an exception for the interrupt is still to be raised.
    ending: number of the received signal that ends the process, or None.
    stops, ends: functions that a `calling` block registered for SIGINT, and for SIGTERM and SIGHUP.
    last_work: functions that `leaving` blocks registered, to be called before the process is ended.
    last_file: absolute path of the file that completes the command, or None.
    over: whether that file has its final name, so that an interrupt has nothing left to stop.
    leaves: whether the process exits right after its `listening` block.
    """

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


_thread = _ThreadState()
_state = _State()


def called_from_c(function: F) -> F:
    """Decorate a function that C code calls, so that Ctrl-C raises no exception while it runs.

    An exception cannot propagate through C code. The decorated function should therefore call
    `asked`, a function of this module that returns whether an interrupt was requested. If `asked`
    returns True, the decorated function should report a failure to the C code.
    """
    assert isinstance(function, FunctionType)
    _called_from_c.add(function.__code__)
    return function


def asked() -> bool:
    """Return whether an interrupt has been requested and not yet handled.

    Long-running work should poll this function and stop. It can be called from any thread.
    """
    if _state.asked_s is not None:
        return True
    cancelled = _thread.cancelled
    return cancelled is not None and cancelled()


def check() -> None:
    """Raise the pending interrupt, such as Ctrl-C, if there is one.

    This works even inside a `held` block, which otherwise delays interrupts. Raises
    KeyboardInterrupt after SIGINT, and SystemExit after SIGTERM or SIGHUP. Threads other than the
    main thread get a KeyboardInterrupt if their `cancellable` block is cancelled.
    """
    cancelled = _thread.cancelled
    if cancelled is not None and cancelled():
        _thread.cancelled = None
        raise KeyboardInterrupt
    if _state.waiting and _thread.is_main:
        _state.waiting = False
        if _state.ending is not None:
            raise SystemExit(128 + _state.ending)
        _forget_unless_listening()
        raise KeyboardInterrupt


def hand_over(error: BaseException) -> None:
    """Store an exception of a Python function that C code called, to raise it after the C call.

    The exception cannot propagate through C code, so this function does not raise it. The C call
    must be inside a `held` block, a context manager of this module. The end of the calling thread's
    outermost `held` block raises the stored exception.
    """
    _thread.raised = error


def forget() -> None:
    """Mark the interrupt as handled. Call this after catching KeyboardInterrupt.

    The next Ctrl-C then counts as a first one and does not kill the process.
    """
    if _state.ending is None:
        _state.asked_s, _state.waiting = None, False


class held:
    """A `with` block that delays interrupts, such as Ctrl-C, until its end.

    Use it around C calls that call Python functions, and around changes that must not stop halfway.
    The end of the block raises the delayed interrupt. If blocks are nested, the outermost block
    does this.

    Code in the block can store an exception by `hand_over`, a function of this module. The end of
    the block raises the stored exception, unless an interrupt was delayed or the block itself
    raises an exception.

    stop: function that makes a C call in the block return soon. When a signal arrives, a helper
        thread calls `stop` at once. A `stop` that is given to a nested block, or on a thread other
        than the main thread, is not used.
    """

    def __init__(self, stop: Callable[[], None] | None = None) -> None:
        self._before: tuple[Any, Any] | None = None
        self._stop = stop

    def __enter__(self) -> None:
        if _thread.depth == 0 and _thread.is_main:
            if not _state.listening:
                self._before = _install()
            if self._stop is not None:
                _watch.begin(self._stop)
        _thread.depth += 1

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        _thread.depth -= 1
        if _thread.depth == 0 and _thread.is_main and self._stop is not None:
            _watch.end()
        if self._before is not None:
            _restore(self._before)
        if _thread.depth:
            return
        raised, _thread.raised = _thread.raised, None
        check()
        if raised is not None and error is None:
            raise raised


@contextmanager
def cancellable(cancelled: Callable[[], bool]) -> Iterator[None]:
    """Let other threads stop the work of the calling thread in a `with` block.

    After `cancelled` returns True, the work is stopped by one KeyboardInterrupt in the calling
    thread. The exception is raised when the work next calls `check`, a function of this module. The
    work must therefore call `check` from time to time. The end of a `held` block, which delays
    interrupts, also calls it. This works on threads that receive no signals.

    cancelled: function that returns whether the work must stop.
    """
    _thread.cancelled = cancelled
    try:
        yield
    finally:
        _thread.cancelled = None


class _Watch:
    """A thread that stops the running work when a signal arrives while the main thread is in C.

    Python's own C-level signal handler writes the signal number into a pipe. The thread reads it
    and calls the stop functions at once, before the Python-level handler can run.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stop: Callable[[], None] | None = None
        self._n_begun = 0
        self._reader = self._writer = self._before = -1

    def begin(self, stop: Callable[[], None]) -> None:
        """Call `stop` whenever a signal arrives that this module handles, until `end` is called."""
        if self._writer < 0:
            self._reader, self._writer = os.pipe()
            os.set_blocking(self._reader, False)
            os.set_blocking(self._writer, False)
            threading.Thread(target=self._run, name="signals", daemon=True).start()
        self._stop = stop
        self._n_begun += 1
        self._before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)

    def end(self) -> None:
        """Stop reacting to signals.

        After this returns, the function that was given to `begin` is neither running nor called
        again.
        """
        signal.set_wakeup_fd(self._before)
        with self._lock:
            self._stop = None
            # A signal that arrived during this C call must not stop the next one.
            with suppress(BlockingIOError):
                os.read(self._reader, 64)

    def _run(self) -> None:
        while True:
            select.select([self._reader], [], [])
            with self._lock, suppress(BlockingIOError):
                for number in os.read(self._reader, 64):
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
        """Exit the process if the main thread is still in the C call that a signal interrupted.

        number: number of the signal.
        n_begun: number of C calls at the time of the signal, which tells whether another call has
            begun.
        """
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
    """A `with` block in which SIGTERM and SIGHUP end the process even if a C call does not return.

    Inside the block, put each C call into a block `with held(stop):`. If one of these signals
    arrives during a C call:

    1. A thread calls `stop` at once, which should make the C call return.
    2. If the call still runs LEAVE_AFTER_S seconds later, another thread calls `last_work` and
       exits the process.

    At all other times, signals are handled as without `leaving`.

    last_work: function that does the work needed before the exit, such as saving a file. It must
        return soon. If `leaving` blocks are nested, the functions of all these blocks are called.
    """
    _state.last_work.append(last_work)
    try:
        yield
    finally:
        _state.last_work.remove(last_work)


@contextmanager
def calling(stop: Callable[[], None], ending: bool = False) -> Iterator[None]:
    """Call `stop` on an interrupt in the `with` block, instead of raising KeyboardInterrupt.

    stop: function without arguments. It can be called at any time, more than once, and from another
        thread.
    ending: whether SIGTERM and SIGHUP also call `stop` instead of ending the process.
    """
    before = None if _state.listening else _install()
    _state.stops.append(stop)
    ends_before, _state.ends = _state.ends, stop if ending else _state.ends
    try:
        yield
    finally:
        _state.ends = ends_before
        _state.stops.pop()
        if before is not None:
            _restore(before)


def leave_at_once() -> None:
    """Make Ctrl-C exit the process immediately and silently.

    A command calls this at its start, before it has begun any work. Later, the context manager
    `listening` of this module makes Ctrl-C raise KeyboardInterrupt instead. If the process was
    started with SIGINT ignored, SIGINT stays ignored.
    """
    _state.leaves = True
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


@contextmanager
def listening() -> Iterator[None]:
    """A `with` block in which SIGINT, SIGTERM and SIGHUP raise exceptions.

    SIGINT (Ctrl-C) raises KeyboardInterrupt. SIGTERM and SIGHUP raise SystemExit. The exception
    comes at once if possible, and otherwise by the end of the block. For example, it is delayed
    while C code calls a Python function. A signal that was ignored before the block, or that
    another handler handles, is not changed.

    After the block, each signal is handled as before the block. But if the process has called
    `leave_at_once`, the signals are ignored, because the process is about to exit.
    """
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
            _restore((signal.SIG_IGN if _state.leaves else before[0], hook))


def declare_last_file(path: Path) -> None:
    """Declare the last file that the running command writes. Interrupts have no effect after it.

    The command must give this file its final name by `rename`, a function of this module. Before
    `rename`, interrupts such as Ctrl-C stop the command as usual. After `rename`, they have no
    effect, because the command has done its work.

    Outside a `with listening():` block, this function does nothing.

    path: the final name of the file.
    """
    if _state.listening:
        _state.last_file = os.path.abspath(path)


def rename(part: Path, path: Path) -> None:
    """Rename a finished temporary file to its final name.

    If an interrupt, such as Ctrl-C, is pending, the file is not renamed, and KeyboardInterrupt or
    SystemExit is raised. Raises OSError if the file cannot be renamed.

    part: the temporary file.
    path: its final name.
    """
    is_last = os.path.abspath(path) == _state.last_file
    with held():
        check()
        os.replace(part, path)
        if is_last:
            _state.over = True
            forget()


def _install() -> tuple[Any, Any] | None:
    """Install the handler of SIGINT, and return what `_restore` needs to remove it.

    Return None and change nothing if SIGINT is ignored or has a handler of another program.
    """
    if not _thread.is_main or signal.getsignal(signal.SIGINT) not in (
        signal.default_int_handler,
        _leave,
    ):
        return None
    handler = signal.signal(signal.SIGINT, _on_interrupt)
    hook, sys.unraisablehook = sys.unraisablehook, _on_unraisable
    return handler, hook


def _install_ending(number: int) -> bool:
    """Install the handler of SIGTERM or SIGHUP. Return whether it was installed.

    A signal that is ignored, or that has a handler already, keeps its handling.

    number: number of the signal.
    """
    if not _thread.is_main or signal.getsignal(number) is not signal.SIG_DFL:
        return False
    signal.signal(number, _on_ending)
    return True


def _restore(before: tuple[Any, Any]) -> None:
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
    if not _is_repeated(signal.SIGINT):
        _state.waiting = True
        _raise_or_wait(frame)


def _on_ending(number: int, frame: FrameType | None) -> None:
    if _state.ends is not None:
        _state.ends()
    elif not _state.over and not _is_repeated(number):
        _state.ending, _state.waiting = number, True
        _raise_or_wait(frame)


def _is_repeated(number: int) -> bool:
    """Record the time of an interrupt, and return whether an earlier one is still pending.

    If the earlier one has been pending for more than FORCE_AFTER_S, kill the process with the
    signal instead.

    number: signal number of the interrupt.
    """
    now_s = monotonic()
    if _state.asked_s is None:
        _state.asked_s = now_s
        return False
    if now_s > _state.asked_s + FORCE_AFTER_S:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
    return True


def _raise_or_wait(frame: FrameType | None) -> None:
    # Outside of a listening block, only held blocks install the handler.
    if _thread.depth or not _state.listening:
        return
    if _would_be_lost(frame):
        _retry_soon()
        return
    check()


def _would_be_lost(frame: FrameType | None) -> bool:
    """Return whether an exception raised in this frame could not reach a caller that catches it.

    This is the case during a callback from C, a `__del__` method or an import.
    """
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


def _retry_soon() -> None:
    signal.signal(signal.SIGALRM, _on_alarm)
    signal.setitimer(signal.ITIMER_REAL, _RETRY_S)


def _on_alarm(_signum: int, frame: FrameType | None) -> None:
    if _state.waiting:
        _raise_or_wait(frame)


def _on_unraisable(what: Any) -> None:
    """Handle an exception that Python would only print. This is our `sys.unraisablehook`.

    An interrupt becomes pending again. An error of a ctypes callback is raised later, at the end of
    the outermost `held` block around the C call. All other exceptions are printed.
    """
    error = what.exc_value
    if isinstance(error, (KeyboardInterrupt, SystemExit)) and _thread.is_main:
        _state.waiting = True
        if _state.listening:
            _retry_soon()
    elif _thread.depth and error is not None and "ctypes callback" in (what.err_msg or ""):
        _thread.raised = error
    else:
        sys.__unraisablehook__(what)


def _forget_unless_listening() -> None:
    if not _state.listening:
        forget()
