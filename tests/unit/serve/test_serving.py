"""`moe-edge serve` with the demo model, seen by a client."""

import re
import signal
import time
from urllib.request import urlopen

import pytest
from command_line import MOE_EDGE, python
from served import DEMO, HANG_S, running, serving
from soaking import soak_clients, soak_requests
from speaking import CAPITAL
from tables import cases

RAM = "160MiB"
QUESTION = [{"role": "user", "content": "What is the capital of Norway?"}]
served = running("--ram", RAM, "--policy", "lru", "--high-tier", "q4_k", "--ctx", "512")


def test_an_answer_has_costs_and_memory_stays_within_the_limit(served):
    data = {"messages": QUESTION, "temperature": 0, "max_tokens": 32, "unknown": [1]}
    answer = served.post("/v1/chat/completions", data)
    assert "Oslo" in answer["choices"][0]["message"]["content"]
    timings = answer["timings"]
    assert 0 < timings["hit_rate"] <= 1 and timings["mix"] == {"q4_k": 1.0}
    assert timings["ram_bytes"] == 160 << 20
    assert timings["peak_rss_bytes"] <= timings["ram_bytes"]
    assert timings["policy"] == "lru" and timings["shared_steps"] is False
    began_s = time.time()
    with urlopen(served.url + "/metrics", timeout=HANG_S) as scraped:
        assert began_s - 3600 < int(scraped.headers["Process-Start-Time-Unix"]) <= began_s
        metrics = scraped.read().decode()
    hits = re.search(r'moe_edge_expert_hits_total\{phase="decode"\} (\d+)', metrics)
    assert hits is not None and int(hits[1]) > 0
    assert "llamacpp:tokens_predicted_total" in metrics
    for name in ("body_bytes", "bodies_waiting", "bodies_refused_total"):
        assert f"\nmoe_edge_{name} 0\n" in metrics
    names = re.findall(r"^# TYPE (\S+)", metrics, re.M)
    assert len(names) == len(set(names))


def test_the_openai_client(served):
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


def test_anthropics_form_has_the_fields_of_the_others(served):
    """The field seed works in Anthropic's form, although llama.cpp's own translation drops it."""
    story = [{"role": "user", "content": "Tell me a story about a fox and a river."}]
    drawn = {"messages": story, "max_tokens": 30, "temperature": 1.5}
    one, same, other = (served.post("/v1/messages", {**drawn, "seed": seed}) for seed in (7, 7, 8))
    assert one["content"] == same["content"] != other["content"]
    assert "hit_rate" in one["timings"]


def test_counted_tokens_equal_read_tokens(served):
    """Counts include tools and the chat template, in each of the three forms."""
    chat = {"messages": QUESTION, "max_tokens": 4, "temperature": 0}
    tools = {"tools": [CAPITAL], "tool_choice": "required"}
    counts = []
    for data in (chat, {**chat, **tools}):
        found = served.post("/v1/chat/completions/input_tokens", data)
        usage = served.post("/v1/chat/completions", data)["usage"]
        assert found["input_tokens"] == usage["prompt_tokens"]
        counts.append(found["input_tokens"])
    assert counts[1] > counts[0] + 20
    asked = {"input": QUESTION[0]["content"], "max_output_tokens": 4}
    found = served.post("/responses/input_tokens", asked)
    assert found == {"object": "response.input_tokens", "input_tokens": counts[0]}
    function = CAPITAL["function"]
    tool = {**function, "input_schema": function["parameters"]}
    called = {"messages": QUESTION, "tools": [tool], "tool_choice": {"type": "any"}}
    found = served.post("/v1/messages/count_tokens", called)
    usage = served.post("/v1/messages", {**called, "max_tokens": 4})["usage"]
    read = usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
    assert found == {"input_tokens": read}


@cases(
    "signum, busy",
    (signal.SIGTERM, ""),
    (signal.SIGTERM, "/v1/completions"),
    (signal.SIGINT, "/v1/completions"),
    (signal.SIGINT, "/tokenize"),
)
def test_a_signal_ends_the_server_cleanly(tmp_path, library, signum, busy):
    """The signal arrives while the server is idle, during a stream, or while a request body
    arrives."""
    with serving(tmp_path, "--ram", RAM, "--policy", "lru", "--ctx", "4096") as served:
        data = {"prompt": "One", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        if busy == "/tokenize":
            half = served.connected()
            half.sendall(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n")
            half.sendall(b'Content-Length: 1000\r\n\r\n{"content": ')
            served.get("/health")
        elif busy:
            streaming = served.asked(busy, data)
            assert streaming.getresponse().readline().startswith(b"data: ")
        start_s = time.monotonic()
        status, said = served.end(signum)
        # Up to two seconds on an idle machine.
        print(f"{signum.name}: {time.monotonic() - start_s:.2f} s")
    assert status == 0, said
    assert "Traceback" not in said and "rror" not in said, said


def test_a_port_in_use_is_reported(tmp_path, served):
    done = python(*MOE_EDGE, "serve", "--port", served.address[1])
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("Error: --host 127.0.0.1 --port")


def test_clients_at_once_get_answers_or_are_told_to_come_later(tmp_path, library):
    statuses = soak_clients(tmp_path, DEMO, clients=8, seconds=5, share=0.6)
    assert statuses[200] and statuses[429]


def test_memory_does_not_grow_once_the_prompt_cache_is_full(tmp_path, library):
    first, last = soak_requests(tmp_path, DEMO, requests=40, cache_ram="1MiB")
    # After so few requests the memory allocator is not yet stable.
    assert last < 1.1 * first
