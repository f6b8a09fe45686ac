"""When an interrupt is raised, and when it waits."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from gguf_tools import interrupts
from gguf_tools.file import unfinished
from gguf_tools.file.unfinished import UnfinishedFile
from gguf_tools.workers import in_order, workers

_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int)
# Jobs of 10 ms, more than two threads do while a busy machine delays the main thread.
MANY = 10_000


def press():
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(params=["in a command", "in a program"])
def listening(request):
    """Runs a test with a command's signal handler and with Python's own."""
    if request.param == "in a program":
        yield
        return
    with interrupts.listening():
        yield


@pytest.fixture(autouse=True)
def everything_put_back():
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not interrupts.asked()


@pytest.mark.usefixtures("listening")
def test_an_interrupt_in_a_callback_is_raised_after_the_call():
    after: list[str] = []

    def call():
        press()
        after.append("the callback goes on")
        return int(interrupts.asked())

    callback = _CALLBACK(call)
    with pytest.raises(KeyboardInterrupt), interrupts.held():
        assert callback() == 1
        after.append("so does who called")
    assert after == ["the callback goes on", "so does who called"]
    with interrupts.held():
        pass
    interrupts.forget()


@pytest.mark.usefixtures("listening")
def test_an_exception_in_a_callback_is_raised_after_the_call(capfd):
    def call():
        raise KeyError("odd")

    callback = _CALLBACK(call)
    with pytest.raises(KeyError, match="odd"), interrupts.held():
        callback()
    assert capfd.readouterr().err == ""


def test_a_callback_outside_of_held_is_not_interrupted():
    done = []

    @interrupts.called_from_c
    def call():
        press()
        done.append(1)
        return 0

    callback = _CALLBACK(call)

    def wait():
        callback()
        time.sleep(60)

    with pytest.raises(KeyboardInterrupt), interrupts.listening():
        wait()
    assert done == [1]


@pytest.mark.usefixtures("listening")
@pytest.mark.parametrize("stops", ["the block", "who is called"])
def test_a_signal_stops_a_call_of_c_that_returns_to_no_python(stops):
    """A signal calls the function that cancels the running C call. The call reads from a pipe until
    something is written, and the signal goes to another thread so that it does not end the read
    itself."""
    reader, writer = os.pipe()
    read = ctypes.CDLL(None).read
    over = threading.Event()
    other = threading.Thread(target=over.wait)
    other.start()
    signal.pthread_kill(other.ident, 0)

    def write():
        os.write(writer, b"x")

    def call(stop):
        with interrupts.held(stop):
            signal.pthread_kill(other.ident, signal.SIGINT)
            assert read(reader, ctypes.create_string_buffer(1), 1) == 1

    try:
        if stops == "the block":
            with pytest.raises(KeyboardInterrupt):
                call(write)
            interrupts.forget()
        else:
            with interrupts.calling(write):
                call(lambda: pytest.fail("it is not asked"))
    finally:
        over.set()
        other.join()
        os.close(reader)
        os.close(writer)


def test_an_import_is_not_interrupted(tmp_path, monkeypatch):
    """An interrupt during an import is raised after it, because some modules would turn it into
    another error."""
    (tmp_path / "slow_to_load.py").write_text(
        "import os, signal\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    for _ in range(1000): pass\n"
        "except BaseException as error:\n"
        "    raise ImportError('made of something else') from error\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KeyboardInterrupt), interrupts.listening():
        import slow_to_load  # noqa: F401

        time.sleep(60)


def test_an_interrupt_that_a_destructor_swallowed_comes_again():
    class Last:
        def __init__(self, act):
            self.act = act

        def __del__(self):
            self.act()

    def swallowed():
        raise KeyboardInterrupt

    for act in (press, swallowed):
        with pytest.raises(KeyboardInterrupt), interrupts.listening():
            Last(act)
            time.sleep(60)


def test_an_interrupt_replaces_the_error_that_it_caused():
    with pytest.raises(KeyboardInterrupt), interrupts.held():
        press()
        raise ValueError("the step failed")
    with pytest.raises(KeyboardInterrupt), interrupts.listening(), interrupts.held():
        press()
        raise ValueError("the step failed")


def test_a_second_interrupt_does_not_disturb_cleanup(monkeypatch):
    monkeypatch.setattr(interrupts, "FORCE_AFTER_S", 600)
    ended = []
    with pytest.raises(KeyboardInterrupt), interrupts.listening():
        try:
            press()
        finally:
            press()
            ended.append(1)
    assert ended == [1]


def test_an_interrupt_during_creation_removes_the_file(tmp_path, monkeypatch):
    create = unfinished.create

    def interrupted(*args):
        made = create(*args)
        press()
        return made

    monkeypatch.setattr(unfinished, "create", interrupted)
    with pytest.raises(KeyboardInterrupt):
        UnfinishedFile(tmp_path / "a")
    assert os.listdir(tmp_path) == []


def test_the_last_file_has_its_name_or_the_command_is_interrupted(tmp_path, monkeypatch):
    replace = os.replace

    def late(*args):
        replace(*args)
        press()

    monkeypatch.setattr(os, "replace", late)
    with interrupts.listening():
        interrupts.declare_last_file(tmp_path / "a")
        UnfinishedFile(tmp_path / "a").complete(synced=False)
        press()
    with pytest.raises(KeyboardInterrupt), interrupts.listening():
        UnfinishedFile(tmp_path / "b").complete(synced=False)
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_without_a_command_no_file_is_the_last_one(tmp_path):
    """Outside of a command, a completed file does not suppress later interrupts."""
    interrupts.declare_last_file(tmp_path / "a")
    UnfinishedFile(tmp_path / "a").complete(synced=False)
    with pytest.raises(KeyboardInterrupt), interrupts.held():
        press()


@pytest.mark.usefixtures("listening")
def test_a_pool_ends_soon_and_completes_running_jobs():
    begun, ended = [], []

    def work(number):
        begun.append(number)
        if number == 2:
            press()
        time.sleep(0.01)
        ended.append(number)
        return number

    with pytest.raises(KeyboardInterrupt), workers(2) as pool:
        list(in_order(pool, work, range(MANY)))
    assert 3 <= len(begun) < MANY
    assert sorted(begun) == sorted(ended)
    interrupts.forget()


def test_other_threads_get_no_interrupt():
    """In other threads, such as a server's, signals do not arrive, but exceptions of callbacks are
    raised."""
    caught: list[BaseException] = []

    def run():
        try:
            with interrupts.held():
                interrupts.hand_over(KeyError("odd"))
        except KeyError as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert len(caught) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_terminating_signal_removes_unfinished_files(tmp_path, number):
    """Unlike Ctrl-C in a chat, such a signal cannot be ignored by the program. It also works if
    SIGINT is ignored."""
    ended = []
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ignored = signal.signal(number, signal.SIG_DFL)  # ignored under nohup
    try:
        with pytest.raises(SystemExit) as left, interrupts.listening():
            unfinished = UnfinishedFile(tmp_path / "a")
            try:
                with interrupts.held():
                    os.kill(os.getpid(), number)
                    interrupts.forget()
                    ended.append("what C called goes on")
                time.sleep(60)
            except KeyboardInterrupt:
                interrupts.forget()
            finally:
                unfinished.discard()
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        after = signal.signal(number, ignored)
    assert left.value.code == 128 + number
    assert ended == ["what C called goes on"]
    assert os.listdir(tmp_path) == []
    assert after is signal.SIG_DFL


HANG_S = 60  # only a deadlock takes this long
STUCK = """
import ctypes, sys
from pathlib import Path
from gguf_tools import interrupts

def last():
    Path(sys.argv[1]).write_text("kept")

with interrupts.listening(), interrupts.leaving(last):
    with interrupts.held(lambda: None):
        print("in C", flush=True)
        mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
        lock(mutex)
        lock(mutex)  # waits for ever, also for signals
"""


def test_a_call_of_c_that_does_not_return_does_not_keep_the_process(tmp_path):
    """The last work is done, and the process ends with the signal's status."""
    command = [sys.executable, "-c", STUCK, str(tmp_path / "last")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "in C\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANG_S) == 128 + signal.SIGTERM
    assert (tmp_path / "last").read_text() == "kept"


def test_a_hang_up_that_is_ignored_stays_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interrupts.listening():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
