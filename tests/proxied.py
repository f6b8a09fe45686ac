"""Servers behind nginx, which runs with the lines that docs/server.md has for it.

One server: streams pass as they come, with comments where they are silent, and a client that
leaves ends its work. Two: whether a conversation stays where its prefix is, and what clients see
when one is killed. Run it by hand: python tests/proxied.py
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO), str(REPO / "tests")]

from served import Served, serving  # noqa: E402

OPTIONS = ("--ram", "180MiB", "--policy", "lru", "--ctx", "512", "--temp", "0", "--parallel", "5")
# As many as a server has places, and an odd number: in turns, each would else always meet the same
# server. They begin differently, since llama.cpp gives a prompt the place with the most alike one.
TOPICS = ("fox", "river", "castle", "bread", "winter")
TURNS = 3
REQUESTS = 10  # of each client, one of the servers dying meanwhile


def documented(word: str) -> str:
    """The lines of docs/server.md that have a word in them."""
    text = (REPO / "docs/server.md").read_text()
    (lines,) = (block for block in re.findall(r"(?:^(?:    .*)?\n)+", text, re.M) if word in block)
    return "\n".join(line[4:] for line in lines.splitlines())


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as made:
        port: int = made.getsockname()[1]
    return port


@contextlib.contextmanager
def proxy(folder: Path, lines: str, servers: list[str]) -> Iterator[int]:
    """nginx on a free port, in front of servers (host:port). Yields the port."""
    port = free_port()
    for number, server in enumerate(servers, 1):
        lines = re.sub(rf"\b(box{number}|127.0.0.1):8080\b", server, lines)
    lines = re.sub(r"listen \d+", f"listen 127.0.0.1:{port}", lines)
    whole = f"daemon off; pid {folder}/pid; error_log stderr crit; events {{}}\n"
    whole += f"http {{ access_log off; client_body_temp_path {folder}/body; {lines} }}"
    path = folder / "nginx.conf"
    path.write_text(whole)
    nginx = shutil.which("nginx") or "/usr/sbin/nginx"
    with subprocess.Popen([nginx, "-p", str(folder), "-c", str(path)]) as process:
        for _ in range(100):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.05)
        try:
            yield port
        finally:
            process.terminate()


def chat(port: int, data: dict[str, Any], **headers: str) -> http.client.HTTPResponse:
    """The beginning of a streamed answer. Raises OSError, or ValueError with a status that is not
    200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    data = {"stream": True, **data}
    headers = {"Content-Type": "application/json", **headers}
    connection.request("POST", "/v1/chat/completions", json.dumps(data), headers)
    answer = connection.getresponse()
    if answer.status != 200:
        connection.close()
        raise ValueError(str(answer.status))
    return answer


def passing(server: Served, port: int) -> None:
    """One server behind nginx: streams, comments, names, clients that leave."""
    story = [{"role": "user", "content": "Tell me a story."}]
    named = {"Host": "chat.example.org", "Origin": "http://chat.example.org"}
    long = {"messages": story, "max_tokens": 3000, "ignore_eos": True}
    answer = chat(port, long, **named)
    begin_s = time.monotonic()
    took_s = [time.monotonic() - begin_s for _ in zip(range(200), answer, strict=False)]
    print(f"a stream: lines after {took_s[0]:.2f}, {took_s[100]:.2f} and {took_s[-1]:.2f} s")
    # The next one waits for its turn, and is told so meanwhile.
    waiting = chat(port, {"messages": story, "max_tokens": 8}, **named)
    print(f"a stream that waits begins with {waiting.readline()!r}")
    answer.close()
    print(f"the other client left: this one ends with {waiting.read().split()[-1]!r}")
    try:
        chat(port, long, Host="evil.example")
    except ValueError as status:
        print(f"another name: status {status}")
    log = [line for line in server.lines if line.startswith("POST")]
    print("\n".join(log))


def streamed(port: int, name: str, messages: list[dict[str, str]]) -> tuple[str, dict[str, Any]]:
    """(its text, its timings). Raises OSError or HTTPException for an answer that breaks off, and
    ValueError with the status for one that is refused."""
    data = {"messages": messages, "max_tokens": 40}
    with chat(port, data, **{"X-Conversation": name}) as answer:
        text, timings, done = "", {}, False
        for raw in answer:
            if raw.strip() == b"data: [DONE]":
                done = True
            elif raw.startswith(b"data: "):
                event = json.loads(raw[6:])
                timings = event.get("timings") or timings
                for choice in event.get("choices", ()):
                    text += choice["delta"].get("content") or ""
        if not done:
            raise ConnectionError("the stream ended early")
    return text, timings


def conversations(port: int) -> tuple[int, int]:
    """(tokens of prompts that were read, those that were in memory already), over turns that
    follow each other in several conversations at once."""
    read = cached = 0
    said: dict[str, list[dict[str, str]]] = {topic: [] for topic in TOPICS}
    for turn in range(TURNS):
        for name, messages in said.items():
            question = f"{name} " * (2 if turn else 40) + "Tell me a story."
            messages.append({"role": "user", "content": question})
            text, timings = streamed(port, name, messages)
            messages.append({"role": "assistant", "content": text})
            if turn:
                read += timings["prompt_n"]
                cached += timings["cache_n"]
    return read, cached


def killed(port: int, victim: Served) -> Counter[str]:
    """What clients saw, each with requests one after another, when a server is killed after some
    of them."""
    seen: Counter[str] = Counter()
    half = threading.Event()

    def client(name: str) -> None:
        for number in range(REQUESTS):
            if number == REQUESTS // 2:
                half.set()
            when = "after" if victim.process.poll() is not None else "before"
            try:
                streamed(port, name, [{"role": "user", "content": "Tell me a story."}])
                seen[f"asked {when}: whole"] += 1
            except ValueError as error:
                seen[f"asked {when}: status {error}"] += 1
            except (OSError, http.client.HTTPException):
                seen[f"asked {when}: broken off"] += 1

    clients = [threading.Thread(target=client, args=(topic,)) for topic in TOPICS]
    for each in clients:
        each.start()
    half.wait()
    victim.process.send_signal(signal.SIGKILL)
    victim.process.wait()
    for each in clients:
        each.join()
    return seen


def main() -> None:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        alone = ("--ram", "180MiB", "--policy", "lru", "--ctx", "4096", "--temp", "0")
        (folder / "alone").mkdir()
        with (
            serving(folder / "alone", *alone, "--allow-host", "chat.example.org") as server,
            proxy(folder, documented("server_name"), [urlsplit(server.url).netloc]) as port,
        ):
            passing(server, port)
        lines = documented("upstream replicas")
        made = []
        for name in ("one", "two"):
            (folder / name).mkdir()
            made.append(stack.enter_context(serving(folder / name, *OPTIONS)))
        servers = [urlsplit(each.url).netloc for each in made]
        for what, config in (
            ("hash", lines),
            ("round robin", re.sub(r"\n *hash [^;]*;", "", lines)),
        ):
            with proxy(folder, config, servers) as port:
                read, cached = conversations(port)
            print(f"{what}: later turns read {read} tokens of prompts, {cached} were in memory")
        with proxy(folder, lines, servers) as port:
            for outcome, count in sorted(killed(port, made[0]).items()):
                print(f"{count} {outcome}")


if __name__ == "__main__":
    main()
