"""A headless Chromium that tests of the server's page control as a person would.

The tests use the DevTools protocol over a pipe, which needs no package.
"""

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import time

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
# No correct answer takes this long.
HANG_S = 120.0
# Flags that disable updates and features that a container lacks.
FLAGS = (
    *("--headless", "--remote-debugging-pipe", "--no-sandbox", "--no-first-run"),
    *("--disable-gpu", "--disable-dev-shm-usage", "--disable-extensions", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)
KEYS = {"Enter": ("Enter", 13, "\r"), "Escape": ("Escape", 27, "")}
KEYS |= {"Tab": ("Tab", 9, ""), " ": ("Space", 32, " ")}
SHIFT = 8


def chromium():
    """Return the browser's path. Skip the test if there is none."""
    for name in NAMES:
        if path := shutil.which(name):
            return path
    pytest.skip(f"no browser is installed ({', '.join(NAMES)})")


class Browser:
    """A Chromium process and its messages."""

    def __init__(self, path, folder):
        """folder: for the browser's profile."""
        commands, self._to = os.pipe()
        self._from, answers = os.pipe()
        # Chromium reads from descriptor 3 and writes to 4. Higher numbers for the copies keep these
        # two free.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (commands, answers)]
        actions = [
            (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_DUP2, ends[0], 3),
            (os.POSIX_SPAWN_DUP2, ends[1], 4),
        ]
        command = [path, *FLAGS, f"--user-data-dir={folder}", "about:blank"]
        environment = {**os.environ, "HOME": str(folder)}
        self._pid = os.posix_spawn(path, command, environment, file_actions=actions, setpgroup=0)
        for end in (commands, answers, *ends):
            os.close(end)
        self._rest = b""
        self._last = 0
        self.events = []

    def call(self, method, session=None, **params):
        """Return a command's result.

        Raises AssertionError if the browser refuses it or has ended.
        """
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            said = self._read()
            if said.get("id") == self._last:
                assert "error" not in said, f"{method}: {said['error']}"
                result = said["result"]
                return result
            self.events.append(said)

    def _read(self):
        end_s = time.monotonic() + HANG_S
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(0, end_s - time.monotonic()))
            assert ready, "timed out: the browser does not answer"
            part = os.read(self._from, 1 << 20)
            assert part, "the browser has ended"
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        said = json.loads(line)
        return said

    def close(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._to)
        os.close(self._from)


class Tab:
    """A page in its own window.

    It shares no stored data with other windows, unless `beside` is a tab that it shares them with.
    `lasting`: it uses the data in the browser's profile, which later browsers use too.
    """

    def __init__(self, browser, beside=None, lasting=False):
        self._browser = browser
        new = {"url": "about:blank", "width": 1200, "newWindow": True}
        if beside:
            self._context = beside._context
        elif lasting:
            self._context = None
        else:
            self._context = browser.call("Target.createBrowserContext")["browserContextId"]
        if self._context:
            new["browserContextId"] = self._context
        target = browser.call("Target.createTarget", **new)["targetId"]
        attached = browser.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        return self._browser.call(method, self._session, **params)

    def events(self, method):
        """Return the parameters of each event of a kind in this tab."""
        return [
            event["params"]
            for event in self._browser.events
            if event.get("method") == method and event.get("sessionId") == self._session
        ]

    def go(self, url):
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def value(self, expression):
        """Return the value of a JavaScript expression. Raises AssertionError if it throws."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, expression):
        """Wait until a JavaScript expression is true, and return its value."""
        end_s = time.monotonic() + HANG_S
        while not (value := self.value(expression)):
            assert time.monotonic() < end_s, f"timed out: {expression}\n{self.text()}"
            time.sleep(0.05)
        return value

    def text(self):
        """Return the text of the page."""
        text = self.value("document.body.innerText")
        return text

    def type(self, text):
        """Insert a text at the keyboard focus."""
        self.call("Input.insertText", text=text)

    def press(self, key, shift=False):
        code, number, text = KEYS[key]
        common = {"key": key, "code": code, "windowsVirtualKeyCode": number}
        common["modifiers"] = SHIFT if shift else 0
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def shape(self, width, height, dark=False):
        """Set the window's size and the preferred colour scheme."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])


@contextlib.contextmanager
def browsing(folder):
    """A browser with an empty profile. Skip the test if none is installed."""
    browser = Browser(chromium(), folder)
    try:
        yield browser
    finally:
        browser.close()
