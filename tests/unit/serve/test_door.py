"""Access to the server: host names, keys, origins, methods and request bodies."""

import asyncio
import json

import pytest
from asgi import Client, ask, body_of
from command_line import run
from fake_served import FakeServed, app_for, assert_refused, quiet, served_by, state_with, whole
from paths import CHAT
from tables import cases

from gguf_tools.errors import TextFileError
from orchestrator.errors import ConfigError, NativeError
from orchestrator.serve.app import application
from orchestrator.serve.settings import ServeSettings

MESSAGE = {"messages": [{"role": "user", "content": "hi"}]}
NAMES, KEY = {"allow_host": "box.lan, other"}, {"api_key": "secret"}
EVIL = "https://evil.example"


def app_with(**settings):
    return app_for(FakeServed(*(whole(b'{"ok": 1}') for _ in range(4))), **settings)


@cases(
    "settings, headers, status",
    # A local server accepts its own host names only.
    (NAMES, {"host": "localhost"}, 200),
    (NAMES, {"host": "LOCALHOST:8080"}, 200),
    (NAMES, {"host": "127.0.0.1:8080"}, 200),
    (NAMES, {"host": "[::1]:8080"}, 200),
    (NAMES, {"host": "box.lan"}, 200),
    (NAMES, {"host": "evil.example"}, 421),
    (NAMES, {"host": "localhost.evil.example"}, 421),
    (NAMES, {"host": ""}, 421),
    (NAMES, {"host": "[::1"}, 421),
    (NAMES, {"host": "localhost#.evil.example"}, 421),
    (NAMES, {"host": "localhost/.evil.example"}, 421),
    (NAMES, {"host": "evil.example@localhost"}, 421),
    # A key is required if the server has one.
    (KEY, {}, 401),
    (KEY, {"authorization": "Bearer secret"}, 200),
    (KEY, {"authorization": "bearer  secret"}, 200),
    (KEY, {"x_api_key": "secret"}, 200),
    (KEY, {"authorization": "Bearer wrong"}, 401),
    (KEY, {"authorization": "Basic secret"}, 401),
    (KEY, {"authorization": "Bearer sécret"}, 401),
    # With a key, a server that listens on all addresses accepts any host name.
    ({"host": "0.0.0.0", **KEY}, {"host": "box.example", "x_api_key": "secret"}, 200),
    # Pages of other origins are refused unless --cors-origin allows them.
    ({}, {"origin": EVIL}, 403),
    ({}, {"origin": "http://localhost:8080"}, 200),
    ({"cors_origin": EVIL}, {"origin": EVIL}, 200),
    ({"cors_origin": EVIL}, {"origin": "https://other.example"}, 403),
)
def test_hosts_keys_and_origins_that_are_accepted(settings, headers, status):
    app = app_with(**settings)
    reply = ask(app, CHAT, MESSAGE, **headers)
    assert reply.status == status
    assert ask(app, "/health").status == 200 or "0.0.0.0" in settings.values()
    let_in = EVIL if "cors_origin" in settings and status == 200 else None
    assert reply.headers.get("access-control-allow-origin") == let_in


@pytest.mark.parametrize("kept", ["ключ", "clé", "cl\udce9"])
def test_a_key_need_not_be_ascii(kept):
    """Clients send keys in UTF-8 or Latin-1. An argument of the command line may have any bytes."""
    app = app_with(api_key=kept)

    def status(brought):
        head = [(b"host", b"localhost"), (b"authorization", b"Bearer " + brought)]
        return asyncio.run(Client(app, "POST", CHAT, body_of(MESSAGE), head).run()).status

    assert status(kept.encode("utf-8", "surrogateescape")) == 200
    assert status(b"cl\xe9") == (401 if kept == "ключ" else 200)
    assert status("кльч".encode()) == 401


@pytest.mark.parametrize("key", ["", "  "])
def test_an_empty_key_is_refused(key):
    with pytest.raises(ConfigError, match="--api-key: the key is empty"):
        ServeSettings(api_key=key).keys()


def test_the_client_is_its_key_or_its_address():
    """Clients take turns by this name, which does not contain the key."""
    seen = []
    for settings, headers in (({}, {}), (KEY, {"x_api_key": "secret"})):
        state, app = served_by(FakeServed(whole()), **settings)
        join = state.gate.join
        state.gate.join = lambda *asked, join=join: seen.append(asked[2]) or join(*asked)
        client = Client(app, "POST", CHAT, body_of(MESSAGE), **headers)
        client._scope["client"] = ("127.0.0.2", 1234)
        assert asyncio.run(client.run()).status == 200
    assert seen[0] == "address 127.0.0.2"
    assert seen[1].startswith("key ") and "secret" not in seen[1]


def test_a_server_for_others_needs_a_key(tmp_path):
    with pytest.raises(ConfigError, match="can be reached from other machines"):
        ServeSettings(host="0.0.0.0").keys()
    keys = tmp_path / "keys"
    keys.write_text("\n one \ntwo\n")
    assert ServeSettings(host="0.0.0.0", api_key_file=keys).keys() == {"one", "two"}
    # with a byte order mark, as editors on Windows save it
    keys.write_text("one\n", encoding="utf-8-sig")
    assert ServeSettings(api_key_file=keys).keys() == {"one"}
    keys.write_bytes("clé\n".encode("latin-1"))
    with pytest.raises(TextFileError, match=r"keys: not UTF-8 text .byte 0x.. at offset 2"):
        ServeSettings(api_key_file=keys).keys()
    keys.write_text("\n")
    with pytest.raises(ConfigError, match="the file has no keys"):
        ServeSettings(api_key_file=keys).keys()


# Header fields of the JavaScript SDKs of OpenAI and Anthropic.
@cases("fields", "authorization,content-type,x-stainless-arch", "anthropic-version,x-api-key")
def test_a_page_that_is_let_in_may_send_the_fields_of_its_sdk(fields):
    """The browser's preflight request (OPTIONS) needs no key, and its answer allows the requested
    fields."""
    asked = {"origin": "https://page.example", "access_control_request_headers": fields}
    preflight = ask(app_with(cors_origin="*", api_key="k"), CHAT, method="OPTIONS", **asked)
    assert preflight.status == 204
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert preflight.headers["access-control-allow-headers"] == fields
    refused = ask(app_with(cors_origin="https://other.example"), CHAT, method="OPTIONS", **asked)
    assert refused.status == 403 and "access-control-allow-headers" not in refused.headers


def with_said(**more):
    return body_of({**MESSAGE, **more})


# These are kept in memory while a request waits, so they are limited.
POLICY_SETTINGS = [3, {"a": []}, {"a": "x" * 300}, {str(n): 1 for n in range(33)}]


@cases(
    "body, status, says",
    (b"", 400, "not JSON"),
    (b"{", 400, "not JSON"),
    (b'{"a": NaN}', 400, "not JSON"),
    (b"[" * 100_000, 400, "not JSON"),
    (b"[]", 400, "JSON object"),
    (b'{"a": "\xff"}', 400, "not UTF-8"),
    ('{"a": 1}'.encode("utf-16"), 400, "not UTF-8"),
    # a byte order mark is skipped
    (b"\xef\xbb\xbf[]", 400, "JSON object"),
    (b'{"a": "' + b"x" * 2**17 + b'"}', 413, "--body-limit"),
    (b'{"a": "\\ud800"}', 400, "half a character"),
    (b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}", 400, "more than 100 levels deep"),
    (with_said(seed=2, temperature=0.5).replace(b"0.5", b"1e400"), 400, "from 0 to"),
    (with_said(chat_template_kwargs={"a": 0.5}).replace(b"0.5", b"1e400"), 400, "too large"),
    (with_said(n=2), 400, "--parallel"),
    (with_said(n="two"), 400, "n must be a whole number from 1"),
    (with_said(n=1, n_cmpl=2), 400, "--parallel"),
    # Small JSON values take more than a hundred times their length in memory.
    (with_said(chat_template_kwargs={"a": [[]] * 11_000}), 400, "more than 10922 JSON values"),
    *[(with_said(moe_edge=wrong), 400, "moe_edge") for wrong in POLICY_SETTINGS],
)
def test_bodies_that_cannot_be_served(body, status, says):
    assert_refused(app_for(FakeServed()), CHAT, body, says, status)


def test_the_body_limit_follows_the_context():
    longest = [
        ServeSettings(**settings).most_body_bytes(n_ctx)
        for settings, n_ctx in (({}, None), ({}, 512), ({}, 2**15), ({"body_limit": 99}, 2**15))
    ]
    assert longest == [2**17, 2**17, 2**19, 99]


ROOM = ": send less, or start the server with --body-limit 512KiB"


@pytest.mark.parametrize(("n_ctx", "says"), [(512, "128 KiB"), (2**15, ROOM)])
def test_a_large_body_that_fits_the_context_names_the_needed_limit(n_ctx, says):
    """Without --ctx, the context is known only after the model has loaded; the limit is known
    before. The message names the limit that the request needs."""
    served = FakeServed()
    served.about.n_ctx = n_ctx
    reply = ask(app_for(served), CHAT, b" " * 2**18)
    said = reply.json()["error"]["message"]
    assert reply.status == 413 and "--body-limit" in said and says in said, said
    assert ("--body-limit 512KiB" in said) is (n_ctx > 512)
    assert said.endswith("load it with its image encoder, --mmproj FILE")  # it may be an image


class Failing(FakeServed):
    def query(self, route, body=b""):
        raise NativeError("there was too little main memory for the answer")


@pytest.mark.parametrize(("path", "data"), [("/tokenize", {"content": "a"}), ("/props", None)])
def test_a_native_failure_on_a_quick_path_is_its_sentence(path, data):
    reply = ask(app_for(Failing()), path, data)
    assert reply.status == 500
    assert reply.json()["error"]["message"] == "there was too little main memory for the answer"


def test_a_model_is_found_by_its_name():
    found = {"id": "org/demo", "object": "model"}
    text = json.dumps({"data": [found], "models": []}).encode()
    app = app_for(FakeServed(*(whole(text) for _ in range(3))))
    expected = found | {"capabilities": ["completion", "tools"]}
    assert ask(app, "/v1/models/org/demo").json() == expected
    assert ask(app, "/models/org/demo").status == 200
    other = ask(app, "/v1/models/gpt-5")
    assert other.status == 404 and "'gpt-5'" in other.json()["error"]["message"]


@cases(
    "path, status",
    ("/../../etc/passwd", 404),
    ("/v1/embeddings", 404),
    ("/slots", 404),
    ("/v1/chat/completions/x", 404),
    (CHAT, 405),
)
def test_unknown_paths_and_methods(path, status):
    reply = ask(app_with(), path)
    assert reply.status == status
    assert status == 404 or "method" in reply.json()["error"]["message"]


def test_nothing_is_served_while_the_model_loads_and_at_the_end():
    state = state_with(None)
    app = application(state, quiet)
    for path, data in (("/health", None), (CHAT, MESSAGE), ("/v1/models", None)):
        reply = ask(app, path, data)
        assert reply.status == 503 and "loading" in reply.json()["error"]["message"]
        assert reply.headers["retry-after"] == "1"
    state.served = FakeServed()
    assert ask(app, "/health").status == 200
    state.stopping = True
    assert ask(app, "/health").status == 503


@cases(
    "path, data, line",
    (CHAT, {**MESSAGE, "user": "secret"}, f"POST {CHAT} 200 "),
    ("/a\n\x1b[31mPOST é", None, "GET /a%0A%1B%5B31mPOST%20%C3%A9 404 "),
)
def test_a_request_is_one_line_of_the_log_without_its_contents(path, data, line):
    lines = []
    ask(application(state_with(FakeServed(whole())), lines.append), path, data)
    assert len(lines) == 1 and lines[0].startswith(line) and "secret" not in lines[0]


def test_settings_of_one_request_go_to_the_policy_and_not_to_llama_cpp():
    served = FakeServed(whole(), whole())
    app = app_for(served)
    # A client cannot choose its slot (`id_slot`) either.
    asked = {**MESSAGE, "moe_edge": {"retention": 0.5}, "id_slot": 7}
    assert ask(app, CHAT, asked).status == 200
    assert served.used == [{"retention": 0.5}]
    ((route, body),) = served.asked
    assert (route, json.loads(body)) == (CHAT, MESSAGE)
    for wrong, says in (("bad", "bad is no setting"), ("odd", "needs a second precision")):
        refused = ask(app, CHAT, {**MESSAGE, "moe_edge": {wrong: 1}})
        assert refused.status == 400 and says in refused.json()["error"]["message"]


def test_a_path_without_v1_is_llama_cpps_own():
    """`/completions` has llama.cpp's answer, with `content`; `/v1/completions` has OpenAI's."""
    served = FakeServed(*(whole() for _ in range(3)))
    app = app_for(served)
    for path in ("/completions", "/completion", "/v1/completions"):
        assert ask(app, path, {"prompt": "a"}).status == 200
    routes = [route for route, _ in served.asked]
    assert routes == ["/completion", "/completion", "/v1/completions"]


def test_a_missing_model_is_reported_before_the_server_is_compiled(tmp_path, monkeypatch):
    def build(*_):
        raise AssertionError("the server is compiled first")

    monkeypatch.setattr("orchestrator.runtime.runtime.server_library", build)
    done = run("serve", "-m", tmp_path / "none.gguf", "--port=0")
    assert (done.exit_code, done.stderr) == (
        1,
        f"Error: {tmp_path / 'none.gguf'}: No such file or directory\n",
    )
