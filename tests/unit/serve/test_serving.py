"""`moe-edge serve` on the demo model, as clients meet it."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pytest

pytest.importorskip("uvicorn", reason="uvicorn is missing: run `make build`")

from served import HANG_S, Served, serving
from speaking import CAPITAL

RAM = "160MiB"
QUESTION = [{"role": "user", "content": "What is the capital of Norway?"}]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, library: object) -> Iterator[Served]:
    cache = tmp_path_factory.mktemp("served")
    options = ("--ram", RAM, "--policy", "lru", "--high-tier", "q4_k", "--ctx", "512")
    with serving(cache, *options) as running:
        yield running


def get(served: Served, path: str) -> str:
    with urlopen(served.url + path, timeout=60) as answer:
        text: str = answer.read().decode()
    return text


def post(served: Served, path: str, data: Any) -> Any:
    body = json.dumps(data).encode()
    request = Request(served.url + path, body, {"Content-Type": "application/json"})
    with urlopen(request, timeout=120) as answer:
        return json.load(answer)


def raw(served: Served, data: bytes) -> bytes:
    """What the server says to these bytes until it closes the connection."""
    where = urlsplit(served.url)
    with socket.create_connection((where.hostname, where.port), timeout=HANG_S) as sock:
        sock.sendall(data)
        said = b""
        try:
            while part := sock.recv(65536):
                said += part
        except ConnectionResetError:
            pass
    return said


def test_an_answer_has_our_costs_and_the_memory_is_kept(served: Served) -> None:
    data = {"messages": QUESTION, "temperature": 0, "max_tokens": 32, "unknown": [1]}
    answer = post(served, "/v1/chat/completions", data)
    assert "Oslo" in answer["choices"][0]["message"]["content"]
    timings = answer["timings"]
    assert 0 < timings["hit_rate"] <= 1 and timings["mix"] == {"q4_k": 1.0}
    assert timings["ram_bytes"] == 160 << 20
    assert timings["peak_rss_bytes"] <= timings["ram_bytes"]
    assert timings["policy"] == "lru" and timings["shared_steps"] is False
    began_s = time.time()
    with urlopen(served.url + "/metrics", timeout=60) as scraped:
        assert began_s - 3600 < int(scraped.headers["Process-Start-Time-Unix"]) <= began_s
        metrics = scraped.read().decode()
    hits = re.search(r'moe_edge_expert_hits_total\{phase="decode"\} (\d+)', metrics)
    assert hits is not None and int(hits[1]) > 0
    assert "llamacpp:tokens_predicted_total" in metrics
    for name in ("body_bytes", "bodies_waiting", "bodies_refused_total"):
        assert f"\nmoe_edge_{name} 0\n" in metrics
    names = re.findall(r"^# TYPE (\S+)", metrics, re.M)
    assert len(names) == len(set(names))


def test_the_openai_client(served: Served) -> None:
    openai = pytest.importorskip("openai", reason="the openai package is missing")
    client = openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0)
    (model,) = client.models.list().data
    assert model.id == "moe-edge-demo"
    common = {"model": model.id, "messages": QUESTION, "temperature": 0, "max_tokens": 40}
    whole = client.chat.completions.create(**common)
    text = ""
    for chunk in client.chat.completions.create(**common, stream=True):
        text += chunk.choices[0].delta.content or "" if chunk.choices else ""
    assert text == whole.choices[0].message.content and "Oslo" in text
    seeded = {**common, "temperature": 1.5, "seed": 7}
    one, other = (client.chat.completions.create(**seeded) for _ in range(2))
    assert one.choices[0].message.content == other.choices[0].message.content
    stopped = client.completions.create(
        model=model.id, prompt="One two three", temperature=0, max_tokens=30, stop=["e"]
    )
    assert "e" not in stopped.choices[0].text
    with pytest.raises(openai.BadRequestError, match="exceed"):
        client.completions.create(model=model.id, prompt="word " * 900, stream=True)
    chosen = client.responses.create(model=model.id, input="What is the capital of Norway?")
    assert chosen.output_text


def test_a_tool_is_called(tmp_path_factory: pytest.TempPathFactory, library: object) -> None:
    openai = pytest.importorskip("openai", reason="the openai package is missing")
    cache = tmp_path_factory.mktemp("tools")
    template = str(Path(__file__).with_name("tools.jinja"))
    options = ("--policy", "dymoe", "--ram", RAM, "--ctx", "1024", "--chat-template", template)
    with serving(cache, *options, "--temp", "0") as served:
        client = openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0)
        common = {
            "model": "any",
            # The demo model has never seen a tool: the call is begun for it.
            "messages": [*QUESTION, {"role": "assistant", "content": "<tool_call>\n"}],
            "tools": [CAPITAL],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "max_tokens": 300,
        }
        whole = client.chat.completions.create(**common)
        (call,) = whole.choices[0].message.tool_calls
        assert whole.choices[0].finish_reason == "tool_calls"
        assert call.function.name == "capital"
        arguments = json.loads(call.function.arguments)
        assert arguments["country"] in ("Norway", "Peru")


def shaped(name: str, **bounds: int) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {name: {"type": "string", **bounds}},
        "required": [name],
        "additionalProperties": False,
    }
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}


def test_a_schema_that_bounds_its_strings_ends_in_json(served: Served) -> None:
    """Without a bound a model may go on in a string until --max-tokens, and the answer says so."""
    for name in ("capital", "story", "song"):
        data = {"messages": QUESTION, "temperature": 0, "max_tokens": 200}
        bounded = post(
            served, "/v1/chat/completions", {**data, "response_format": shaped(name, maxLength=40)}
        )
        (choice,) = bounded["choices"]
        assert choice["finish_reason"] == "stop"
        assert len(json.loads(choice["message"]["content"])[name]) <= 40
        cut = {**data, "max_tokens": 6, "response_format": shaped(name, minLength=400)}
        (choice,) = post(served, "/v1/chat/completions", cut)["choices"]
        assert choice["finish_reason"] == "length"


def test_responses_keep_a_schema(served: Served) -> None:
    """Its form is another one than the chat's, of which llama.cpp knows nothing."""
    named = shaped("capital", maxLength=20)["json_schema"]
    data = {"input": "What is the capital of Norway?", "max_output_tokens": 60, "temperature": 0}
    form = {"format": {"type": "json_schema", **named}}
    answer = post(served, "/v1/responses", {**data, "text": form})
    (text,) = [part["text"] for item in answer["output"] for part in item.get("content", ())]
    assert isinstance(json.loads(text)["capital"], str)
    plain = post(served, "/v1/responses", {**data, "text": {"format": {"type": "text"}}})
    assert "Oslo" in plain["output"][0]["content"][0]["text"]


def test_anthropics_form_has_the_fields_of_the_others(served: Served) -> None:
    """llama.cpp's own reading of it drops them."""
    data = {"messages": QUESTION, "max_tokens": 60, "temperature": 0}
    schema = shaped("capital", maxLength=20)["json_schema"]["schema"]
    form = {"format": {"type": "json_schema", "schema": schema}}
    answer = post(served, "/v1/messages", {**data, "output_config": form})
    assert isinstance(json.loads(answer["content"][0]["text"])["capital"], str)
    assert answer["stop_reason"] == "end_turn" and "hit_rate" in answer["timings"]
    story = [{"role": "user", "content": "Tell me a story about a fox and a river."}]
    drawn = {"messages": story, "max_tokens": 30, "temperature": 1.5}
    one, same, other = (
        post(served, "/v1/messages", {**drawn, "seed": seed})["content"][0]["text"]
        for seed in (7, 7, 8)
    )
    assert one == same != other


def test_what_is_counted_is_what_is_read(served: Served) -> None:
    """Tools and the template included, in each of the three forms."""
    chat = {"messages": QUESTION, "max_tokens": 4, "temperature": 0}
    tools = {"tools": [CAPITAL], "tool_choice": "required"}
    counts = []
    for data in (chat, {**chat, **tools}):
        found = post(served, "/v1/chat/completions/input_tokens", data)
        usage = post(served, "/v1/chat/completions", data)["usage"]
        assert found["input_tokens"] == usage["prompt_tokens"]
        counts.append(found["input_tokens"])
    assert counts[1] > counts[0] + 20
    asked = {"input": QUESTION[0]["content"], "max_output_tokens": 4}
    found = post(served, "/responses/input_tokens", asked)
    assert found == {"object": "response.input_tokens", "input_tokens": counts[0]}
    function = CAPITAL["function"]
    tool = {**function, "input_schema": function["parameters"]}
    called = {"messages": QUESTION, "tools": [tool], "tool_choice": {"type": "any"}}
    found = post(served, "/v1/messages/count_tokens", called)
    usage = post(served, "/v1/messages", {**called, "max_tokens": 4})["usage"]
    read = usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
    assert found == {"input_tokens": read}


def test_the_anthropic_client(served: Served) -> None:
    anthropic = pytest.importorskip("anthropic", reason="the anthropic package is missing")
    client = anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)
    common = {"model": "any", "max_tokens": 40, "messages": QUESTION}
    common["extra_body"] = {"temperature": 0}
    whole = client.messages.create(**common)
    with client.messages.stream(**common) as stream:
        text = "".join(stream.text_stream)
    assert text == whole.content[0].text and "Oslo" in text
    assert client.messages.count_tokens(model="any", messages=QUESTION).input_tokens > 5


def test_a_client_that_leaves_ends_its_answer(served: Served) -> None:
    where = urlsplit(served.url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=60)
    data = {"prompt": "One two", "max_tokens": 400, "ignore_eos": True, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(data))
    answer = connection.getresponse()
    assert answer.readline().startswith(b"data: ")
    connection.close()
    answer.close()
    for _ in range(10 * HANG_S):
        is_logged = any("POST /v1/completions 200" in line for line in served.lines)
        if is_logged and "moe_edge_requests_running 0" in get(served, "/metrics"):
            break
        time.sleep(0.1)
    else:
        pytest.fail("the work for a client that left goes on, or nothing was said of it")


def post_bytes(body: bytes) -> bytes:
    head = f"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


ATTACKS = {
    "no key of HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"400"),
    "another name": (b"GET /v1/models HTTP/1.1\r\nHost: evil.example\r\n\r\n", b"421"),
    "path traversal": (b"GET /../../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n", b"404"),
    "encoded traversal": (
        b"GET /%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"404",
    ),
    "a long line": (b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", b""),
    "a body said to be huge": (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n",
        b"413",
    ),
    "broken UTF-8": (post_bytes(b'{"content":"\xff"}'), b"400"),
    "a lone surrogate": (post_bytes(b'{"content":"\\ud800"}'), b""),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_get_one_clear_status(served: Served, name: str) -> None:
    data, status = ATTACKS[name]
    said = raw(served, data.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1))
    assert status in said.split(b"\r\n")[0], said[:200]
    assert b"root:" not in said
    assert b"\nserver:" not in said.lower()  # which would name uvicorn to whoever attacks
    assert json.loads(get(served, "/health"))["status"] == "ok"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("busy", ["", "/v1/completions", "/tokenize"])
def test_a_signal_ends_it_cleanly(
    tmp_path: Path, library: object, signum: signal.Signals, busy: str
) -> None:
    """Idle, in the middle of a stream, and in the middle of a request that comes in."""
    with serving(tmp_path, "--ram", RAM, "--policy", "lru", "--ctx", "4096") as served:
        sock = None
        if busy:
            where = urlsplit(served.url)
            sock = http.client.HTTPConnection(where.hostname or "", where.port, timeout=60)
            data = {"prompt": "One", "max_tokens": 4000, "ignore_eos": True, "stream": True}
            if busy == "/tokenize":
                sock.putrequest("POST", busy)
                sock.putheader("Content-Length", "1000")
                sock.endheaders(b'{"content": ')
                get(served, "/health")
            else:
                sock.request("POST", busy, json.dumps(data))
                assert sock.getresponse().readline().startswith(b"data: ")
        start_s = time.monotonic()
        status, said = served.end(signum)
        # Within two seconds where the machine is idle: tests/helpers/soaking.py signals.
        print(f"{signum.name}: {time.monotonic() - start_s:.2f} s")
    assert status == 0, said
    assert "Traceback" not in said and "rror" not in said, said


def test_a_port_that_is_taken_is_one_sentence(tmp_path: Path, served: Served) -> None:
    import subprocess
    import sys

    from served import REPO

    port = str(urlsplit(served.url).port)
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator", "serve", "--port", port],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("Error: --host 127.0.0.1 --port")
