"""A model replaced by prepared answers."""

import os
from collections import deque
from dataclasses import dataclass, field
from threading import Event
from types import SimpleNamespace
from typing import Any

from asgi import ask

from orchestrator.errors import ConfigError, PolicyError
from orchestrator.runtime.answer import Answer
from orchestrator.runtime.overflow import PromptLengths
from orchestrator.runtime.runtime import Stats
from orchestrator.serve.admission import BODY_FACTOR
from orchestrator.serve.app import application
from orchestrator.serve.settings import ServeSettings
from orchestrator.serve.state import State


@dataclass
class FakeRequest:
    """A native request with a prepared answer.

    hold: event that the first part waits for. pause: event that the last part waits for. at_once:
    `take` returns all available parts, and not one at a time.
    """

    status: int
    is_stream: bool
    answer: list[bytes]
    hold: Event | None = None
    pause: Event | None = None
    at_once: bool = False
    cancelled: Event = field(default_factory=Event)
    closed: bool = False
    come: deque[bytes] = field(default_factory=deque)

    def run(self, ready=-1):
        try:
            if not self._waits_for(self.hold):
                self.status, self.is_stream = 500, False
                return
            for number, part in enumerate(self.answer):
                if number == len(self.answer) - 1 and not self._waits_for(self.pause):
                    return
                self.come.append(part)
                if ready >= 0:
                    os.write(ready, b"\0")
        finally:
            self.closed = True
            if ready >= 0:
                os.write(ready, b"\0")

    def _waits_for(self, event):
        while event is not None and not event.wait(0.01):
            if self.cancelled.is_set():
                return False
        return True

    def take(self):
        is_all, text = self.closed, b""
        while self.come and (self.at_once or not text):
            text += self.come.popleft()
        return text, is_all and not self.come

    @property
    def n_left(self):
        return sum(map(len, self.come))

    def close(self):
        self.closed = True

    def whole(self):
        self.at_once = True
        self.run()
        return self.status, self.take()[0]

    def cancel(self):
        self.cancelled.set()


class FakeAnswer(Answer):
    """An answer whose parts may still be taken one at a time after its end."""

    def __init__(self, request, *others):
        self._parts = request
        super().__init__(request, *others)

    def take(self):
        text, is_all = self._parts.take()
        return text, self.has_ended and is_all


class FakeServed:
    """A model and runtime that hand out prepared requests in order and record the
    requests."""

    max_tokens, parallel, most_scored = None, 1, 16384
    most_body_bytes, body_factor = 2**17, BODY_FACTOR
    images, most_image_bytes = None, 0

    def __init__(self, *requests):
        self.runtime = self
        self.about = SimpleNamespace(
            name="m", architecture="qwen3moe", digest="ab" * 32, modified_s=1e9
        )
        self.about.n_ctx, self.about.n_cells, self.about.n_vocab = 512, 1000, 4096
        self.lengths = PromptLengths()
        self.requests = list(requests)
        self.asked: list[tuple[str, bytes]] = []
        self.sequences: list[list[int]] = []
        self.used: list[dict[str, Any]] = []
        self.forgotten: list[int] = []
        self.notes: list[str] = []

    def query(self, route, body=b""):
        self.asked.append((route, body))
        return self.requests[len(self.asked) - 1]

    def submit(self, body, route, sequences, settings, forget):
        self.sequences.append(list(sequences))
        self.forgotten += forget
        request = self.query(route, body)

        def answer(_answer, ready):
            if "odd" in settings:
                raise PolicyError("odd needs a second precision")
            self.used.append(settings)
            request.run(ready)

        def costs(_answer):
            return {"hit_rate": 0.5, "shared_steps": False}

        return FakeAnswer(
            *(request, answer, costs, self.failure, lambda: 40.7, lambda: ("end", False)),
            *(self.fault, ""),
        )

    def count_tokens(self, text):
        """(number of tokens, characters of the longest word), as for English text."""
        return len(text) // 4, 12

    def fault(self):
        return ""

    def note_once(self, sentence):
        self.notes.append(sentence)

    def stats(self):
        return Stats("managed", device_bytes=3, policy={})

    def settings_for(self, changes):
        if "bad" in changes:
            raise ConfigError("bad is no setting")
        return changes

    def failure(self):
        return "the disk is gone"


def whole(answer=b"{}", status=200, **more):
    """A request whose answer comes in one part."""
    return FakeRequest(status, False, [answer], **more)


def streaming(*parts, **more):
    return FakeRequest(200, True, list(parts), **more)


def state_with(served, **settings):
    state = State(ServeSettings(**settings))
    state.served = served
    return state


def quiet(_line):
    """A log that discards its lines."""


def app_for(served, **settings):
    """The application for this model."""
    return application(state_with(served, **settings), quiet)


def served_by(served, **settings):
    """The application for this model, with its state."""
    state = state_with(served, **settings)
    return state, application(state, quiet)


def reply_of(request, path, data):
    """The reply to a client if llama.cpp gives this answer."""
    return ask(app_for(FakeServed(request)), path, data)


def assert_refused(app, path, data, says, status=400):
    """Assert that the request is refused with this status and a message that contains `says`."""
    reply = ask(app, path, data)
    assert reply.status == status and says in reply.json()["error"]["message"], reply.body
