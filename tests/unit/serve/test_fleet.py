"""A fleet on Ray Serve: its options, and the replica that gets a request."""

import asyncio
import json
import re
import socket
from types import SimpleNamespace
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from asgi import ask, begun
from fake_served import quiet
from paths import CHAT
from served import DEMO, HANG_S, REPO, library_path
from tables import cases
from waiting import wait_until

from orchestrator.errors import MoeEdgeError
from orchestrator.serve.service import Service
from orchestrator.serve.settings import options_of, server_settings
from orchestrator.serve.views import of_replica, together

KEY = "fleet-key"
GIVEN = {"model": "model.gguf", "ram": "1GiB", "prompt-cache": "/shared", "parallel": 2}
REPLICA = {"model": DEMO, "ram": "400MiB", "threads": 1}
ENDLESS = {"prompt": "Once " * 40, "max_tokens": 900, "stream": True, "ignore_eos": True}


def test_options_are_those_of_serve_as_a_file_has_them():
    config, settings = options_of({**GIVEN, "exact": True, "retention": "0.9"})
    assert (config.ram, str(config.prompt_cache), settings.parallel) == (2**30, "/shared", 2)
    assert config.remember and config.given("retention") == 0.9 and config.layout == "file"
    assert not options_of({**GIVEN, "remember": "false"})[0].remember


def test_every_option_of_serve_is_one_of_a_fleet():
    from orchestrator.cli.serve import serve

    options = {option.name for option in serve.params} - {"help_all", "named"}
    assert options == set(server_settings())


@cases(
    "changes, sentence",
    ({"paralel": 2}, "`moe-edge serve` has no option --paralel: did you mean parallel?"),
    ({"parallel": "two"}, "'parallel' must be a whole number"),
    ({"parallel": 0}, "'parallel' must be 1"),
    ({"system": "Be kind."}, "`moe-edge serve` has no option --system"),
    ({"ram": "much"}, "'much' is not a size"),
    ({"model": None}, "'model' is missing"),
)
def test_a_wrong_option_gets_a_sentence(changes, sentence):
    asked = {name: value for name, value in {**GIVEN, **changes}.items() if value is not None}
    with pytest.raises(MoeEdgeError, match=sentence):
        options_of(asked)


def test_metrics_of_several_servers_are_one_text():
    head = "# HELP hits Experts in memory.\n# TYPE hits counter\n"
    texts = [of_replica(f'{head}hits{{phase="decode"}} {n}\nhits {n}\n', f"r{n}") for n in (1, 2)]
    said = together(texts)
    assert said.count(head) == 1 and said.startswith(head)
    found = re.findall(r"^hits\{(.*)\} (\d)$", said, re.MULTILINE)
    assert found == [
        (f'{before}replica="r{n}"', str(n)) for n in (1, 2) for before in ('phase="decode",', "")
    ]


def test_a_replica_is_placed_by_its_memory_and_its_cores():
    pytest.importorskip("ray", reason="ray is missing: pip install 'moe-edge[fleet]'")
    from orchestrator.serve.fleet import app

    with pytest.raises(MoeEdgeError, match="give ram=SIZE"):
        app({"model": "model.gguf"})
    with pytest.raises(MoeEdgeError, match="leave out port"):
        app({**GIVEN, "port": 8080})
    with pytest.raises(MoeEdgeError, match="leave out allow-model-change"):
        app({**GIVEN, "allow-model-change": True})
    made = app({**GIVEN, "threads": 3, "queue": 5, "timeout": 60})._bound_deployment
    assert made.ray_actor_options == {"memory": 2**30, "num_cpus": 3}
    assert made.max_ongoing_requests == 7
    assert made._deployment_config.graceful_shutdown_timeout_s == 60


def test_a_file_without_http_options_needs_a_key(monkeypatch):
    """Without HTTP options Ray listens on all addresses, so a fleet without a key is refused."""
    schema = pytest.importorskip("ray.serve.schema", reason="ray is missing")
    from orchestrator.serve import fleet

    client = SimpleNamespace(http_config=schema.HTTPOptionsSchema())
    monkeypatch.setattr(fleet, "is_initialized", lambda: True)
    monkeypatch.setattr(fleet, "_get_global_client", lambda **_: client)
    with pytest.raises(MoeEdgeError, match="can be reached from other machines"):
        fleet.app(GIVEN)
    assert fleet.app({**GIVEN, "api-key": KEY})
    client.http_config.host = "127.0.0.1"
    assert fleet.app(GIVEN)


def test_a_conversation_goes_to_one_replica_and_else_to_the_least_busy():
    """Ray chooses the replica with the fewest requests in the first group that has a free one."""
    pytest.importorskip("ray", reason="ray is missing: pip install 'moe-edge[fleet]'")
    from ray.serve._private.common import DeploymentID, ReplicaID

    from orchestrator.serve.routing import Router

    ids = [ReplicaID(name, DeploymentID("Replica", "app")) for name in ("a", "b", "c")]
    replicas = [SimpleNamespace(replica_id=one) for one in ids]
    router = object.__new__(Router)
    router._num_virtual_nodes, router._num_fallback_replicas = 100, 0
    router._deployment_id = "Replica"
    router._replicas = dict(zip(ids, replicas, strict=True))
    router._rebuild_ring(frozenset(ids))

    def order(session):
        metadata = SimpleNamespace(session_id=session, internal_request_id="other")
        asked = SimpleNamespace(metadata=metadata, routing_context=SimpleNamespace())
        return asyncio.run(router.choose_replicas(replicas, asked))

    assert order("") == [replicas]
    firsts = set()
    for session in map(str, range(50)):
        (own,), others = order(session)
        assert order(session) == [[own], others]
        assert {*map(id, others), id(own)} == set(map(id, replicas)) and len(others) == 2
        firsts.add(own.replica_id)
    assert firsts == set(ids)


def wanted(text):
    said = [{"role": "user", "content": text}]
    return {"messages": said, "max_tokens": 8, "stream": True, "temperature": 0}


def end_of(lines):
    """(the last line of a stream, the timings of the event before it)."""
    return lines[-2], json.loads(lines[-3].removeprefix(b"data: "))["timings"]


def test_a_drained_replica_leaves_its_conversations_to_the_next_one(library, tmp_path, monkeypatch):
    """A new replica reads one token of each conversation that a drained one saved. This test runs
    without Ray, which calls `drain` after the last answer."""
    library_path()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = {**REPLICA, "ctx": 1024, "parallel": 2, "prompt-cache": tmp_path / "prompts"}
    # The answers to these questions are certain, so rounding changes no token of them.
    questions = [wanted(f"What is the capital of {each}? " * 15) for each in ("Norway", "Peru")]

    async def answered(app):
        return await asyncio.gather(*[begun(app, CHAT, each)[1] for each in questions])

    n_read = []
    for _ in range(2):
        service = Service(*options_of(options), quiet)
        try:
            service.load(lambda _what, _done: None)
            replies = asyncio.run(answered(service.app))
        finally:
            service.drain()
        assert ask(service.app, "/health").status == 503
        for reply in replies:
            last, timings = end_of(reply.body.split(b"\n\n"))
            assert last == b"data: [DONE]"
            n_read.append(timings["prompt_n"])
    assert len(list((tmp_path / "prompts").iterdir())) == 2
    assert min(n_read[:2]) > 100 and n_read[2:] == [1, 1]


@pytest.fixture(scope="module")
def started(tmp_path_factory, library):
    """Function that deploys one replica with these options and returns the URL once it answers."""
    ray = pytest.importorskip("ray", reason="ray is missing: pip install 'moe-edge[fleet]'")
    from ray import serve

    from orchestrator.serve.fleet import app

    cache = tmp_path_factory.mktemp("fleet")
    library_path()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def start(**more):
        folder = {"prompt-cache": cache / "prompts", "body-limit": "64KiB"}
        serve.run(app({**REPLICA, "api-key": KEY, **folder, **more}), name="fleet")
        return f"http://127.0.0.1:{port}"

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        patch.setenv("PYTHONPATH", str(REPO))
        ray.init("local", num_cpus=1, include_dashboard=False, object_store_memory=10**8)
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            yield start
        finally:
            serve.shutdown()
            ray.shutdown()


@pytest.fixture(scope="module")
def url(started):
    return started()


def asked(url, path, data=None, key=KEY):
    body = None if data is None else json.dumps(data).encode()
    head = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    return urlopen(Request(url + path, body, head), timeout=HANG_S)


def running(url):
    found = re.search(
        r'^moe_edge_requests_running\{replica="\w+"\} (\d+)$', text(url), re.MULTILINE
    )
    assert found
    return int(found[1])


def text(url):
    return asked(url, "/metrics").read().decode()


def test_live(url):
    """Streams, keys, limits, metrics and disconnects through Ray's own proxy."""
    said = wanted("Tell me of a boat. " * 20)
    lines = asked(url, CHAT, said).read().split(b"\n\n")
    assert end_of(lines)[0] == b"data: [DONE]" and len(lines) > 4
    assert json.load(asked(url, "/health")) == {"status": "ok"}
    for status, data, key in ((401, said, "wrong"), (413, {"prompt": "a" * 2**17}, KEY)):
        with pytest.raises(HTTPError) as refused:
            asked(url, "/v1/completions", data, key)
        assert refused.value.code == status
        assert json.load(refused.value)["error"]["code"] == status
    answer = asked(url, "/v1/completions", ENDLESS)
    answer.readline()
    assert running(url) == 1
    answer.close()
    wait_until(lambda: not running(url), "the request still runs after its client left")


def test_live_replica_that_is_replaced(started, url):
    """The old replica completes its answer. The new one starts when the only core is free, and
    reuses the prompt that the old one saved."""
    answer = asked(url, "/v1/completions", ENDLESS)
    answer.readline()
    started(alias="newer")
    last, timings = end_of(answer.read().split(b"\n\n"))
    assert last == b"data: [DONE]" and timings["predicted_n"] == 900
    assert json.load(asked(url, "/v1/models"))["data"][0]["id"] == "newer"
    lines = asked(url, "/v1/completions", {**ENDLESS, "max_tokens": 1}).read().split(b"\n\n")
    assert end_of(lines)[1]["prompt_n"] == 1 < end_of(lines)[1]["cache_n"]
