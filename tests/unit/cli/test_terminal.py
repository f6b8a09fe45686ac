"""The interactive loop on a real terminal: a pseudo-terminal, a process, and keys."""

from __future__ import annotations

import fcntl
import json
import os
import re
import select
import struct
import subprocess
import sys
import termios
import time

import fake_engine
import pytest

UP = "\x1b[A"
CTRL_C = "\x03"
CTRL_D = "\x04"
PROMPT = re.compile(r"> \Z")
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
TIMEOUT_S = 600.0  # only what hangs takes so long


class Terminal:
    """`moe-edge chat` with the fake engine on a pseudo-terminal of 100 columns."""

    def __init__(self, *args: str, home, stderr=None, **environment: str) -> None:
        self._master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        env = {**os.environ, "TERM": "xterm", "HOME": str(home), **environment}
        for name in ("NO_COLOR", "XDG_STATE_HOME", "COLUMNS", "LINES"):
            if name not in environment:
                env.pop(name, None)
        self._process = subprocess.Popen(
            [sys.executable, fake_engine.__file__, "chat", *(args or ("-m", "x.gguf"))],
            stdin=slave,
            stdout=slave,
            stderr=stderr or slave,
            env=env,
            start_new_session=True,
            # Ctrl-C only signals a process whose controlling terminal this is.
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)
        self.raw = ""
        self._seen = 0

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        self._process.kill()
        self._process.wait()
        os.close(self._master)

    def send(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def wait(self, pattern: str | re.Pattern[str]) -> str:
        """Read until `pattern` matches what came since the last wait; that text, plain."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            new = ESCAPES.sub("", self.raw[self._seen :]).replace("\r\n", "\n")
            if re.search(pattern, new):
                self._seen = len(self.raw)
                return new
            ready, _, _ = select.select([self._master], [], [], deadline - time.monotonic())
            assert ready, f"waited for {pattern!r}, got {new!r}"
            try:
                data = os.read(self._master, 65536)
            except OSError:  # the other end is closed
                data = b""
            assert data, f"it ended before {pattern!r}: {new!r}"
            self.raw += data.decode()

    def ask(self, line: str) -> str:
        """Type a line, and wait for the next prompt."""
        self.send(line + "\n")
        return self.wait(PROMPT)

    def finish(self) -> int:
        while True:
            try:
                data = os.read(self._master, 65536)
            except OSError:
                data = b""
            if not data:
                return self._process.wait(timeout=TIMEOUT_S)
            self.raw += data.decode()


@pytest.fixture
def start(tmp_path):
    """Opens a Terminal at its first prompt."""
    opened = []

    def open_terminal(*args: str, **environment: str) -> Terminal:
        terminal = Terminal(*args, home=tmp_path, **environment)
        opened.append(terminal)
        terminal.greeting = terminal.wait(PROMPT)
        return terminal

    yield open_terminal
    for terminal in opened:
        terminal.__exit__()


def test_a_conversation(start):
    terminal = start()
    assert "fake: 8 layers of 16 experts, 4 a token, in q4_k q2_k\n" in terminal.greeting
    assert "managed: dymoe 4/2" in terminal.greeting
    answer = terminal.ask("hello")
    line = "TTFT 12 ms · 48.9 tokens/s · hits 93 % · q4_k 75 % q2_k 25 % (computed q4_k 81 % q2_k"
    assert f"\nHi there!\n{line}" in answer
    assert "<more>" in terminal.ask("more")
    terminal.send("/quit\n")
    assert terminal.finish() == 0


def test_ctrl_d_leaves(start):
    terminal = start()
    terminal.send(CTRL_D)
    assert terminal.finish() == 0


def test_ctrl_c_stops_the_answer_and_keeps_the_session(start, tmp_path):
    terminal = start()
    terminal.send("long\n")
    terminal.wait("5 6 7")
    terminal.send(CTRL_C)
    stopped = terminal.wait(PROMPT)
    assert "\nstopped · TTFT" in stopped
    assert "Traceback" not in terminal.raw
    assert "Hi there!" in terminal.ask("hello")
    terminal.ask(f"/save {tmp_path}/talk.jsonl")
    messages = [json.loads(line) for line in (tmp_path / "talk.jsonl").open()]
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    assert messages[1]["content"].startswith("0 1 2 3 4 5 6 7")
    assert "499" not in messages[1]["content"]


def test_ctrl_c_at_the_prompt_says_how_to_leave(start):
    terminal = start()
    for typed in ("", "", "half a li"):
        # CPython notices the signal only once it waits for keys, a moment after the prompt.
        time.sleep(0.3)
        terminal.send(typed)
        terminal.wait(typed)
        terminal.send(CTRL_C)
        assert "/quit or Ctrl-D leaves" in terminal.wait(PROMPT)
    assert "Hi there!" in terminal.ask("hello")


def test_ctrl_c_while_loading_leaves(tmp_path):
    with Terminal("-m", "slow.gguf", home=tmp_path) as terminal:
        terminal.wait(r"Loading \[#+-*\] +\d+ %")
        terminal.send(CTRL_C)
        assert terminal.finish() == 130
        assert "Traceback" not in terminal.raw


def test_bars_appear_and_go(start):
    terminal = start("-m", "slow.gguf")
    assert "Loading [" in terminal.greeting
    text = terminal.ask("slow")
    assert re.search(r"Reading 1000 tokens \[#+-*\] +\d+ %", text)
    assert terminal.raw.rindex("\r\x1b[K") < terminal.raw.rindex("read")
    assert "Reading" not in terminal.ask("hello")


def test_ctrl_c_during_prefill(start):
    terminal = start()
    terminal.send("slow\n")
    terminal.wait("Reading 1000 tokens")
    terminal.send(CTRL_C)
    assert "stopped" in terminal.wait(PROMPT)
    assert "Hi there!" in terminal.ask("hello")


def test_the_arrow_key_brings_back_lines_of_earlier_sessions(start, tmp_path):
    terminal = start()
    terminal.ask("hello")
    terminal.send("/quit\n")
    assert terminal.finish() == 0
    history = tmp_path / ".local/state/moe-edge/history"
    assert "hello\n" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0
    terminal = start()
    terminal.send(UP + UP)
    terminal.wait("hello")
    assert "Hi there!" in terminal.ask("")


def test_tab_completes_a_command(start):
    terminal = start()
    terminal.send("/ret\t")
    terminal.wait("/retention")
    assert "r=0.5" in terminal.ask("0.5")


def test_the_history_may_be_unwritable(start, tmp_path):
    (tmp_path / "state").write_text("a file, not a folder")
    terminal = start(XDG_STATE_HOME=str(tmp_path / "state"))
    assert "History is not kept: " in terminal.greeting
    assert "Hi there!" in terminal.ask("hello")


COMMANDS = [
    (
        "/help",
        [
            "/help",
            "/regen",
            "/read FILE",
            "/reset",
            "/system TEXT",
            "/stats",
            "/policy NAME",
            "/retention R",
            "/save FILE",
            "/quit",
            '"""',
            "Ctrl-C",
        ],
    ),
    ("/?", ["/regen", "another answer"]),
    ("/regen", ["Error: nothing was answered yet"]),
    ("/reset", ["The conversation is empty."]),
    ("/clear", ["The conversation is empty."]),
    ("/system", ["System prompt: none"]),
    ("/system Be brief.", ["The conversation is empty.", "System prompt: Be brief."]),
    ("/system -", ["System prompt: none"]),
    ("/stats", ["Nothing was answered yet."]),
    ("/policy", ["dymoe 4/2"]),
    ("/policy lru", ["managed: lru"]),
    ("/policy lur", ["Error: unknown policy 'lur'; known: dymoe, lru"]),
    ("/retention 0.5", ["It has no effect under this policy", "managed: lru"]),
    ("/policy dymoe", ["managed: dymoe"]),
    ("/retention 0.25", ["managed: dymoe r=0.25"]),
    ("/retention much", ["must be a number from 0 to 1, not 'much'"]),
    ("/read", ["Error: /read needs a file name"]),
    ("/read /nowhere", ["Error: /nowhere: No such file or directory"]),
    ("/read /dev/null", ["Error: /dev/null: not a regular file"]),
    ('"""one line"""', ["<one line>"]),
    ('"""/reset"""', ["</reset>"]),
    ("/save", ["Error: /save needs a file name"]),
    ("/save /nowhere/at/all", ["Error: /nowhere/at/all: No such file or directory"]),
    ("/stat", ["Error: unknown command /stat: did you mean /stats?"]),
    ("/etc/passwd", ["Error: unknown command /etc/passwd: /help lists them (a leading space"]),
    (" /etc/passwd", ["</etc/passwd>"]),
    ("fail", ["half an\n", "Error: model.gguf: read error at offset 4096"]),
    ("silence", ["(no answer)"]),
    ("   ", []),
]


def test_every_command(start):
    terminal = start()
    for line, expected in COMMANDS:
        text = terminal.ask(line)
        for part in expected:
            assert part in text, (line, text)
    assert "hits 93 %" in terminal.ask("hello")
    table = terminal.ask("/stats")
    assert re.search(r"callback_us_p50 +11\.000", table)
    assert "Traceback" not in terminal.raw


def test_a_message_of_several_lines(start):
    terminal = start()
    terminal.send('"""first\n')
    terminal.wait(r"\. \Z")
    terminal.send("/second\n")
    terminal.wait(r"\. \Z")
    assert "<first\n/second\nthird>" in terminal.ask('third"""')
    terminal.send('"""first\n')
    terminal.wait(r"\. \Z")
    time.sleep(0.3)  # as above
    terminal.send(CTRL_C)
    assert "leaves" in terminal.wait(PROMPT)
    assert "<again>" in terminal.ask("again")
    terminal.send('"""first\n' + CTRL_D)
    assert terminal.finish() == 0


def test_a_file_stands_before_one_message(start, tmp_path):
    terminal = start()
    text = tmp_path / "a text.txt"
    text.write_text("Grüße\n")
    assert f"5 characters of {text} stand" in terminal.ask(f"/read {text}")
    assert "<Grüße\n\nwhat is it?>" in terminal.ask("what is it?")
    assert "<what is it?>" in terminal.ask("what is it?")
    text.write_bytes(b"ab\xff")
    assert f"Error: {text}: not a text in UTF-8, at byte 2" in terminal.ask(f"/read {text}")
    text.write_text("x" * 10**6)
    assert f"Error: {text}: too long for the context" in terminal.ask(f"/read {text}")


def test_an_answer_is_given_once_more(start, tmp_path):
    terminal = start()
    terminal.ask("hello")
    assert "Hi there!" in terminal.ask("/regen")
    terminal.ask(f"/save {tmp_path}/talk.jsonl")
    assert len((tmp_path / "talk.jsonl").read_text().splitlines()) == 2


def test_the_statistics_line_without_unicode(start):
    terminal = start(PYTHONIOENCODING="ascii")
    assert "TTFT 12 ms | 48.9 tokens/s" in terminal.ask("hello")


def test_save_replaces_only_its_own_file(start, tmp_path):
    terminal = start()
    other = tmp_path / "other.txt"
    other.write_text("mine")
    terminal.ask("hello")
    assert "exists: choose another name" in terminal.ask(f"/save {other}")
    assert other.read_text() == "mine"
    assert "2 messages written" in terminal.ask("/save ~/talk.jsonl")
    terminal.ask("more")
    assert "4 messages written" in terminal.ask("/save ~/talk.jsonl")
    assert len((tmp_path / "talk.jsonl").read_text().splitlines()) == 4


def test_the_model_cannot_control_the_terminal(start):
    terminal = start()
    before = len(terminal.raw)
    terminal.ask("loud")
    said = terminal.raw[before:]
    assert "red[31m ]0;titlebell" in said
    for control in ("\x1b[31m", "\x1b]", "\x07", "\x9b", "\u202e"):
        assert control not in said


def test_no_color_is_honoured(start):
    def sgr(terminal: Terminal) -> list[str]:
        terminal.ask("hello")
        return re.findall(r"\x1b\[[0-9;]*m", terminal.raw)

    assert sgr(start())
    assert sgr(start(NO_COLOR="1")) == []
    assert sgr(start(TERM="dumb")) == []


def test_a_dumb_terminal_gets_no_bar(start):
    terminal = start("-m", "slow.gguf", TERM="dumb")
    assert "Loading" not in terminal.greeting
    assert "\x1b[K" not in terminal.raw


def test_json_needs_a_prompt(tmp_path):
    with Terminal("-m", "x.gguf", "--json", home=tmp_path) as terminal:
        assert terminal.finish() == 2
        assert "--json needs a prompt" in terminal.raw


def test_one_shot_on_a_terminal_shows_the_statistics(tmp_path):
    with Terminal("-m", "x.gguf", "-p", "hello", home=tmp_path) as terminal:
        assert terminal.finish() == 0
        plain = ESCAPES.sub("", terminal.raw)
        assert plain.startswith("Hi there!\r\nTTFT 12 ms · ")


def test_json_on_a_terminal_is_escaped(tmp_path):
    with Terminal("-m", "x.gguf", "-p", "loud", "--json", home=tmp_path) as terminal:
        assert terminal.finish() == 0
        assert json.loads(terminal.raw)["text"] == fake_engine.HOSTILE
        assert "\x9b" not in terminal.raw
        assert "\x1b" not in terminal.raw
