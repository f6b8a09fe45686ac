"""A headless Chromium, driven as a person would: for tests that look at the server's page.

It is spoken to in the DevTools protocol over a pipe, which needs no package.
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
# Only what hangs takes so long.
HANG_S = 120.0
# Flags without which it asks its maker for updates, or needs what a container lacks.
FLAGS = (
    *("--headless", "--remote-debugging-pipe", "--no-sandbox", "--no-first-run"),
    *("--disable-gpu", "--disable-dev-shm-usage", "--disable-extensions", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)
KEYS = {"Enter": ("Enter", 13, "\r"), "Escape": ("Escape", 27, "")}
KEYS |= {"Tab": ("Tab", 9, ""), " ": ("Space", 32, " ")}
SHIFT = 8


def chromium():
    """The browser's path. Skips the test where there is none."""
    for name in NAMES:
        if path := shutil.which(name):
            return path
    pytest.skip(f"no browser is installed ({', '.join(NAMES)})")


class Browser:
    """One process of Chromium, and the messages to it and from it."""

    def __init__(self, path, folder):
        """folder: where it keeps its profile."""
        commands, self._to = os.pipe()
        self._from, answers = os.pipe()
        # Chromium reads the descriptor 3 and writes 4. Copies above them keep the two free.
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
        """A command's result. Raises AssertionError where the browser refuses it, or is gone."""
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
            assert ready, "the browser hangs"
            part = os.read(self._from, 1 << 20)
            assert part, "the browser is gone"
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
    """One page in a window of its own, which shares nothing with others."""

    def __init__(self, browser):
        self._browser = browser
        context = browser.call("Target.createBrowserContext")["browserContextId"]
        new = {"url": "about:blank", "browserContextId": context, "width": 1200}
        target = browser.call("Target.createTarget", **new)["targetId"]
        attached = browser.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        return self._browser.call(method, self._session, **params)

    def events(self, method):
        """The parameters of each event of a kind that this tab told of."""
        return [
            event["params"]
            for event in self._browser.events
            if event.get("method") == method and event.get("sessionId") == self._session
        ]

    def go(self, url):
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def value(self, expression):
        """What JavaScript computes. Raises AssertionError with what it throws."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, expression):
        """Waits until JavaScript computes something true, and returns that."""
        end_s = time.monotonic() + HANG_S
        while not (value := self.value(expression)):
            assert time.monotonic() < end_s, f"never true: {expression}\n{self.text()}"
            time.sleep(0.05)
        return value

    def text(self):
        """What the page says."""
        text = self.value("document.body.innerText")
        return text

    def type(self, text):
        """Puts a text where the keyboard's focus is."""
        self.call("Input.insertText", text=text)

    def press(self, key, shift=False):
        code, number, text = KEYS[key]
        common = {"key": key, "code": code, "windowsVirtualKeyCode": number}
        common["modifiers"] = SHIFT if shift else 0
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def shape(self, width, height, dark=False):
        """Another size of the window, and the colours that the person prefers."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])


@contextlib.contextmanager
def browsing(folder):
    """A browser with an empty profile. Skips where none is installed."""
    browser = Browser(chromium(), folder)
    try:
        yield browser
    finally:
        browser.close()
