"""Who gets in: names, keys, origins, methods, bodies."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("starlette", reason="starlette is missing: run `make build`")

from asgi import Client, FakeBackend, FakeRequest, app_for, ask, state_with

from orchestrator.cli.main import cli
from orchestrator.errors import ConfigError, NativeError
from orchestrator.serve.app import application
from orchestrator.serve.settings import ServeSettings

CHAT = "/v1/chat/completions"
MESSAGE = {"messages": [{"role": "user", "content": "hi"}]}


def with_said(**more: Any) -> bytes:
    return json.dumps({**MESSAGE, **more}).encode()


def app_with(**settings: Any) -> Any:
    answers = [FakeRequest(200, False, [b'{"ok": 1}']) for _ in range(4)]
    return app_for(FakeBackend(*answers), **settings)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8080", 200),
        ("127.0.0.1:8080", 200),
        ("[::1]:8080", 200),
        ("box.lan", 200),
        ("evil.example", 421),
        ("localhost.evil.example", 421),
        ("", 421),
        ("[::1", 421),
    ],
)
def test_a_local_server_answers_to_its_own_names(host: str, status: int) -> None:
    reply = ask(app_with(allow_host="box.lan, other"), CHAT, MESSAGE, host=host)
    assert reply.status == status


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer secret"}, 200),
        ({"authorization": "bearer  secret"}, 200),
        ({"x_api_key": "secret"}, 200),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": "Basic secret"}, 401),
        ({"authorization": "Bearer sécret"}, 401),
    ],
)
def test_a_key_is_asked_for_where_there_is_one(headers: dict[str, str], status: int) -> None:
    app = app_with(api_key="secret")
    assert ask(app, CHAT, MESSAGE, **headers).status == status
    assert ask(app, "/health").status == 200


@pytest.mark.parametrize("kept", ["ключ", "clé", "cl\udce9"])
def test_a_key_need_not_be_ascii(kept: str) -> None:
    """Clients send UTF-8, some Latin-1; a file may have any bytes."""
    app = app_with(api_key=kept)

    def status(brought: bytes) -> int:
        head = [(b"host", b"localhost"), (b"authorization", b"Bearer " + brought)]
        return asyncio.run(Client(app, "POST", CHAT, with_said(), head).run()).status

    assert status(kept.encode("utf-8", "surrogateescape")) == 200
    assert status(b"cl\xe9") == (401 if kept == "ключ" else 200)
    assert status("кльч".encode()) == 401


def test_a_server_for_others_needs_a_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can be reached from other machines"):
        ServeSettings(host="0.0.0.0").keys()
    keys = tmp_path / "keys"
    keys.write_text("\n one \ntwo\n")
    assert ServeSettings(host="0.0.0.0", api_key_file=keys).keys() == {"one", "two"}
    keys.write_text("\n")
    with pytest.raises(ConfigError, match="has no key in it"):
        ServeSettings(api_key_file=keys).keys()
    # With a key, any name of the machine will do.
    app = app_with(host="0.0.0.0", api_key="k")
    assert ask(app, CHAT, MESSAGE, host="box.example", x_api_key="k").status == 200


def test_pages_of_other_origins_may_not_ask_unless_they_are_let_in() -> None:
    evil = {"origin": "https://evil.example"}
    refused = ask(app_with(), CHAT, MESSAGE, **evil)
    assert refused.status == 403 and "access-control-allow-origin" not in refused.headers
    assert ask(app_with(), CHAT, MESSAGE, origin="http://localhost:8080").status == 200
    open_app = app_with(cors_origin="https://evil.example")
    let_in = ask(open_app, CHAT, MESSAGE, **evil)
    assert let_in.headers["access-control-allow-origin"] == "https://evil.example"
    preflight = ask(open_app, CHAT, method="OPTIONS", **evil)
    assert preflight.status == 204
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert ask(open_app, CHAT, MESSAGE, origin="https://other.example").status == 403


def test_a_page_that_is_let_in_may_send_the_fields_of_its_sdk() -> None:
    # A browser asks before: those of openai's for JavaScript, and those of Anthropic's.
    for fields in ("authorization,content-type,x-stainless-arch", "anthropic-version,x-api-key"):
        app = app_with(cors_origin="*", api_key="k")
        asked = {"origin": "https://page.example", "access_control_request_headers": fields}
        preflight = ask(app, CHAT, method="OPTIONS", **asked)
        assert preflight.status == 204
        assert preflight.headers["access-control-allow-headers"] == fields
        refused = ask(
            app_with(cors_origin="https://other.example"), CHAT, method="OPTIONS", **asked
        )
        assert refused.status == 403 and "access-control-allow-headers" not in refused.headers


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"", 400, "not JSON"),
        (b"{", 400, "not JSON"),
        (b'{"a": NaN}', 400, "not JSON"),
        (b"[" * 100_000, 400, "not JSON"),
        (b"[]", 400, "JSON object"),
        (b'{"a": "\xff"}', 400, "not UTF-8"),
        (b'{"a": "' + b"x" * 2000 + b'"}', 413, "--body-limit"),
        (b'{"a": "\\ud800"}', 400, "half a character"),
        (b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}", 400, "more than 100 deep"),
        (with_said(seed=2, temperature=0.5).replace(b"0.5", b"1e400"), 400, "from 0 to"),
        (with_said(chat_template_kwargs={"a": 0.5}).replace(b"0.5", b"1e400"), 400, "too large"),
        (with_said(n=2), 400, "--parallel"),
        (with_said(n="two"), 400, "n must be a whole number from 1"),
        (with_said(n=1, n_cmpl=2), 400, "--parallel"),
    ],
)
def test_bodies_that_cannot_be_served(body: bytes, status: int, says: str) -> None:
    state = state_with(FakeBackend())
    if status == 413:
        state.backend.most_body_bytes = 1000  # type: ignore[union-attr]
    reply = ask(application(state, lambda _line: None), CHAT, body)
    assert reply.status == status
    assert says in reply.json()["error"]["message"]


def test_a_body_is_as_long_as_the_context_has_use_for() -> None:
    longest = [
        ServeSettings(**settings).most_body_bytes(n_ctx)
        for settings, n_ctx in (({}, None), ({}, 512), ({}, 2**15), ({"body_limit": 99}, 2**15))
    ]
    assert longest == [2**17, 2**17, 2**19, 99]


def test_a_body_that_the_context_has_room_for_is_told_which_limit_it_needs() -> None:
    """Without --ctx the context is known once the model has loaded, and the limit before."""
    for n_ctx, says in (
        (512, "128 KiB"),
        (2**15, ": the context has room for --body-limit 512KiB"),
    ):
        backend = FakeBackend()
        backend.slot_context = n_ctx
        app = app_for(backend)
        reply = ask(app, CHAT, b" " * 2**18)
        said = reply.json()["error"]["message"]
        assert reply.status == 413 and "--body-limit" in said and says in said, said
        assert ("the context has room" in said) is (n_ctx > 512)


class Failing(FakeBackend):
    def request(self, route: str, body: bytes) -> FakeRequest:
        raise NativeError("there was no memory for the answer")


def test_a_native_failure_on_a_quick_path_is_its_sentence() -> None:
    app = app_for(Failing())
    for path, data in (("/tokenize", {"content": "a"}), ("/props", None)):
        reply = ask(app, path, data)
        assert reply.status == 500
        assert reply.json()["error"]["message"] == "there was no memory for the answer"


def test_a_count_for_anthropics_clients_has_errors_in_their_form() -> None:
    error = b'{"error": {"code": 400, "message": "no", "type": "invalid_request_error"}}'
    for path, outer in (
        ("/v1/messages/count_tokens", "error"),
        ("/v1/chat/completions/input_tokens", None),
    ):
        backend = FakeBackend(FakeRequest(400, False, [error]))
        app = app_for(backend)
        reply = ask(app, path, MESSAGE)
        assert reply.status == 400 and reply.json()["error"]["message"] == "no"
        assert reply.json().get("type") == outer


def test_what_takes_more_memory_than_its_length_says_is_less() -> None:
    """Small values and pieces of tokens take a hundred times their length and more."""
    app = app_for(FakeBackend(*(FakeRequest(200, False, [b"{}"]) for _ in range(2))))
    for path, data, says in (
        (CHAT, {**MESSAGE, "chat_template_kwargs": {"a": [[]] * 11_000}}, "at most 10922 values"),
        ("/tokenize", {"content": "a" * 20_000, "with_pieces": True}, "at most 16 KiB"),
        ("/tokenize", {"content": [1] * 20_000}, ""),
        ("/tokenize", {"content": "a" * 15_000, "with_pieces": True}, ""),
    ):
        reply = ask(app, path, data)
        assert reply.status == (400 if says else 200), reply.body
        assert says in reply.body.decode()


def test_settings_for_the_policy_are_few_and_short() -> None:
    """They are kept while a request waits."""
    app = app_for(FakeBackend())
    for wrong in ({"a": []}, {"a": "x" * 300}, {str(n): 1 for n in range(33)}):
        reply = ask(app, CHAT, {**MESSAGE, "moe_edge": wrong})
        assert reply.status == 400 and "moe_edge" in reply.json()["error"]["message"]


def test_a_model_is_found_by_its_name() -> None:
    found = {"id": "org/demo", "object": "model"}
    text = json.dumps({"data": [found], "models": []}).encode()
    app = app_for(FakeBackend(*(FakeRequest(200, False, [text]) for _ in range(3))))
    assert ask(app, "/v1/models/org/demo").json() == found
    assert ask(app, "/models/org/demo").status == 200
    other = ask(app, "/v1/models/gpt-5")
    assert other.status == 404 and "'gpt-5'" in other.json()["error"]["message"]


def test_paths_and_methods_that_there_are_not() -> None:
    app = app_with()
    for path in ("/../../etc/passwd", "/v1/embeddings", "/slots", "/v1/chat/completions/x"):
        assert ask(app, path).status == 404
    reply = ask(app, CHAT, method="GET")
    assert reply.status == 405 and "method" in reply.json()["error"]["message"]


def test_nothing_is_served_while_the_model_loads_and_at_the_end() -> None:
    state = state_with(None)
    app = application(state, lambda _line: None)
    for path, data in (("/health", None), (CHAT, MESSAGE), ("/v1/models", None)):
        reply = ask(app, path, data)
        assert reply.status == 503 and "loading" in reply.json()["error"]["message"]
        assert reply.headers["retry-after"] == "1"
    state.backend = FakeBackend()  # type: ignore[assignment]
    assert ask(app, "/health").status == 200
    state.stopping = True
    assert ask(app, "/health").status == 503


def test_a_line_of_the_log_has_no_contents() -> None:
    lines: list[str] = []
    backend = FakeBackend(FakeRequest(200, False, [b"{}"]))
    ask(application(state_with(backend), lines.append), CHAT, {**MESSAGE, "user": "secret"})
    assert len(lines) == 1 and lines[0].startswith(f"POST {CHAT} 200 ")
    assert "secret" not in lines[0]


def test_a_path_in_the_log_is_one_line_as_it_was_asked_for() -> None:
    lines: list[str] = []
    app = application(state_with(FakeBackend()), lines.append)
    ask(app, "/a\n\x1b[31mPOST é")
    assert len(lines) == 1 and lines[0].startswith("GET /a%0A%1B%5B31mPOST%20%C3%A9 404 ")


def test_a_client_may_not_choose_its_slot() -> None:
    backend = FakeBackend(FakeRequest(200, False, [b"{}"]))
    ask(app_for(backend), CHAT, {**MESSAGE, "id_slot": 7})
    (route, body) = backend.asked[0]
    assert route == CHAT and b"id_slot" not in body and b"messages" in body


def test_settings_of_one_request_go_to_the_policy_and_not_to_llama_cpp() -> None:
    backend = FakeBackend(FakeRequest(200, False, [b"{}"]))
    app = app_for(backend)
    assert ask(app, CHAT, {**MESSAGE, "moe_edge": {"retention": 0.5}}).status == 200
    assert backend.changes == [{"retention": 0.5}]
    assert b"moe_edge" not in backend.asked[0][1]
    refused = ask(app, CHAT, {**MESSAGE, "moe_edge": {"bad": 1}})
    assert refused.status == 400 and "bad is no setting" in refused.json()["error"]["message"]
    assert ask(app, CHAT, {**MESSAGE, "moe_edge": 3}).status == 400


def test_a_path_without_v1_is_llama_cpps_own() -> None:
    """`/completions` has llama.cpp's answer, with `content`; `/v1/completions` has OpenAI's."""
    backend = FakeBackend(*(FakeRequest(200, False, [b"{}"]) for _ in range(3)))
    app = app_for(backend)
    for path in ("/completions", "/completion", "/v1/completions"):
        assert ask(app, path, {"prompt": "a"}).status == 200
    routes = [route for route, _ in backend.asked]
    assert routes == ["/completion", "/completion", "/v1/completions"]


def test_a_model_that_is_not_there_is_said_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(_: object) -> None:
        raise AssertionError("the server is built first")

    monkeypatch.setattr("orchestrator.serve.run.server_library", build)
    done = CliRunner().invoke(cli, ["serve", "-m", str(tmp_path / "none.gguf"), "--port=0"])
    assert (done.exit_code, done.stderr) == (
        1,
        f"Error: {tmp_path / 'none.gguf'}: No such file or directory\n",
    )
