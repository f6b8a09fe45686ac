"""`moe-edge chat` with the fake engine on a pseudo-terminal."""

import fcntl
import os
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import fake_engine

UP = "\x1b[A"
CTRL_C = "\x03"
CTRL_D = "\x04"
PROMPT = re.compile(r"> \Z")
# The end of bracketed paste comes with a return to the first column, where the cursor is already.
ESCAPES = re.compile(r"\x1b\[\?2004l\r|\x1b\[[0-9;?]*[A-Za-z]")
TIMEOUT_S = 600.0  # only what hangs takes so long


class Terminal:
    """`moe-edge chat` with the fake engine on a pseudo-terminal."""

    def __init__(self, *args, home, stderr=None, columns=100, **environment):
        self._master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
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

    def send(self, keys):
        os.write(self._master, keys.encode())

    def wait(self, pattern):
        """Read until `pattern` matches what came since the last wait; that text, plain."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            new = ESCAPES.sub("", self.raw[self._seen :]).replace("\r\n", "\n")
            if re.search(pattern, new):
                self._seen = len(self.raw)
                return new
            left_s = max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([self._master], [], [], left_s)
            assert ready and left_s, f"waited for {pattern!r}, got {new[-2000:]!r}"
            try:
                data = os.read(self._master, 65536)
            except OSError:  # the other end is closed
                data = b""
            assert data, f"it ended before {pattern!r}: {new!r}"
            self.raw += data.decode()

    def until_it_reads(self):
        """Waits until the process waits for keys. CPython forgets Ctrl-C until the next key where
        it comes a moment before."""
        process, deadline = Path(f"/proc/{self._process.pid}"), time.monotonic() + TIMEOUT_S
        looks = 0
        while looks < 3:
            time.sleep(0.05)
            is_asleep = (process / "stat").read_text().rpartition(") ")[2].startswith("S")
            where = (process / "wchan").read_text()  # nothing or 0 where the kernel keeps it
            in_select = where in ("", "0") or "poll" in where or "select" in where
            looks = looks + 1 if is_asleep and in_select else 0
            assert time.monotonic() < deadline, f"it never waits for keys: {where}"

    def ask(self, line):
        """Type a line, and wait for the next prompt."""
        self.send(line + "\n")
        return self.wait(PROMPT)

    def finish(self):
        while True:
            try:
                data = os.read(self._master, 65536)
            except OSError:
                data = b""
            if not data:
                return self._process.wait(timeout=TIMEOUT_S)
            self.raw += data.decode()
