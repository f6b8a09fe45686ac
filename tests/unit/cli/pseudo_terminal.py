"""`moe-edge chat` on a pseudo-terminal."""

import codecs
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

import fake_runtime

UP = "\x1b[A"
CTRL_C = "\x03"
CTRL_D = "\x04"
PROMPT = re.compile(r"> \Z")
# The end of bracketed paste also returns to the first column, where the cursor already is.
ESCAPES = re.compile(r"\x1b\[\?2004l\r|\x1b\[[0-9;?]*[A-Za-z]")
TIMEOUT_S = 600.0  # only a deadlock takes this long
# Kernel functions in which a process waits for keys. The last one occurs if Ctrl-C discarded the
# keys.
WAITS = ("poll", "select", "wait_woken")


FAKE = (sys.executable, fake_runtime.__file__)


class Terminal:
    """`moe-edge chat` on a pseudo-terminal. program: moe-edge, by default with the fake runtime."""

    def __init__(self, *args, home, stderr=None, columns=100, program=FAKE, **environment):
        self._master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        env = {**os.environ, "TERM": "xterm", "HOME": str(home), **environment}
        for name in ("NO_COLOR", "XDG_STATE_HOME", "COLUMNS", "LINES"):
            if name not in environment:
                env.pop(name, None)
        self._process = subprocess.Popen(
            [*program, "chat", *(args or ("-m", "x.gguf"))],
            stdin=slave,
            stdout=slave,
            stderr=stderr or slave,
            env=env,
            start_new_session=True,
            # Ctrl-C signals only processes with this controlling terminal.
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)
        self.raw = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._seen = 0

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        self._process.kill()
        self._process.wait()
        os.close(self._master)

    def send(self, keys):
        os.write(self._master, keys.encode())

    def wait(self, pattern, timeout_s=TIMEOUT_S):
        """Read until `pattern` matches the text since the last wait. Returns that text without
        escapes."""
        deadline = time.monotonic() + timeout_s
        while True:
            new = ESCAPES.sub("", self.raw[self._seen :]).replace("\r\n", "\n")
            if re.search(pattern, new):
                self._seen = len(self.raw)
                return new
            left_s = max(0.0, deadline - time.monotonic())
            came = self._read(left_s)
            assert came is not None and left_s, f"waited for {pattern!r}, got {new[-2000:]!r}"
            assert came, f"it ended before {pattern!r}: {new!r}"

    def _read(self, wait_s):
        """Read output of the process. Returns the number of bytes, 0 at its end, or None if none
        arrived within wait_s."""
        ready, _, _ = select.select([self._master], [], [], wait_s)
        if not ready:
            return None
        try:
            data = os.read(self._master, 65536)
        except OSError:  # the process has closed the terminal
            data = b""
        self.raw += self._decoder.decode(data)
        return len(data)

    def until_it_reads(self, timeout_s=TIMEOUT_S):
        """Wait until the process waits for keys. CPython delays a Ctrl-C that arrives just before
        that until the next key."""
        process, deadline = Path(f"/proc/{self._process.pid}"), time.monotonic() + timeout_s
        looks = 0
        while looks < 3:
            came = self._read(0.05)  # otherwise the process might wait for buffer space
            if came:
                looks = 0
                continue
            assert came is None, f"it ended with {self._process.wait()}: {self.raw[-2000:]!r}"
            is_asleep = (process / "stat").read_text().rpartition(") ")[2].startswith("S")
            where = (process / "wchan").read_text()  # empty or 0 if the kernel hides it
            in_select = where in ("", "0") or any(each in where for each in WAITS)
            looks = looks + 1 if is_asleep and in_select else 0
            assert time.monotonic() < deadline, f"it never waits for keys: {where}"

    def ask(self, line):
        """Type a line and wait for the next prompt."""
        self.send(line + "\n")
        return self.wait(PROMPT)

    def signal(self, number):
        """Send a signal to this process only."""
        self._process.send_signal(number)

    def finish(self):
        while True:
            if not self._read(TIMEOUT_S):
                return self._process.wait(timeout=TIMEOUT_S)
