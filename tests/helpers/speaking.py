"""What scripts and tests that speak to a running server share: requests, streams and its memory."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

HANG_S = 600

# A function that a model may call, and what it takes.
ARGUMENTS: dict[str, Any] = {
    "type": "object",
    "properties": {"country": {"enum": ["Norway", "Peru"]}},
    "required": ["country"],
    "additionalProperties": False,
}
CAPITAL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "capital",
        "description": "The capital of a country.",
        "parameters": ARGUMENTS,
    },
}


@dataclass
class Said:
    """One answer: its status, its texts with the times at which they came, and its last object."""

    status: int = 0
    texts: list[str] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return "".join(self.texts)


def stream(url: str, data: dict[str, Any]) -> Said:
    """A streamed answer of llama.cpp's own form, from its start to its end."""
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=HANG_S)
    said = Said()
    try:
        body = json.dumps({**data, "stream": True})
        connection.request("POST", "/completion", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        said.status = answer.status
        if answer.status != 200:
            said.last = json.loads(answer.read())
            return said
        # What it says is read when all is here: that would take time from a server that computes.
        come: list[tuple[float, bytes]] = []
        while part := answer.read1(1 << 16):
            come.append((perf_counter(), part))
        rest = b""
        for at_s, part in come:
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                if not line.startswith(b"data: {"):
                    continue
                said.last = json.loads(line.removeprefix(b"data: "))
                if said.last.get("content"):
                    said.texts.append(said.last["content"])
                    said.times_s.append(at_s)
        return said
    finally:
        connection.close()


def post(url: str, path: str, data: Any, **head: str) -> tuple[int, Any]:
    """(status, what the JSON of the answer says)."""
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=HANG_S)
    try:
        head["Content-Type"] = "application/json"
        connection.request("POST", path, json.dumps(data), head)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()
