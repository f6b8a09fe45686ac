"""Published documents: /openapi.json describes all paths and nothing else. The page is one file,
needs no network, and can be used by keyboard."""

import importlib.util
import re
from html.parser import HTMLParser

import pytest
from asgi import ask
from command_line import python
from fake_served import FakeServed, app_for
from served import serving
from starlette.routing import Route

from orchestrator.serve.schemas import document
from orchestrator.serve.views import page_response

PAGE = bytes(page_response().body).decode()

# Checks of schemathesis for every request and answer.
CHECKS = (
    "not_a_server_error",
    "content_type_conformance",
    "response_schema_conformance",
    "unsupported_method",
)


def test_the_description_has_exactly_the_served_paths():
    app = app_for(FakeServed())
    routes = {
        (route.path.replace(":path}", "}"), method.lower())
        for route in app.routes
        if isinstance(route, Route)
        for method in (route.methods or ())
        if method != "HEAD"
    }
    paths = ask(app, "/openapi.json").json()["paths"]
    assert {(path, method) for path, methods in paths.items() for method in methods} == routes


def test_references_of_the_description_exist():
    whole = document(has_key=False)
    assert "security" not in whole
    names = set(whole["components"]["schemas"])
    used = set(re.findall(r"#/components/schemas/(\w+)", str(whole)))
    assert used == names


def test_the_description_needs_the_key_and_declares_it():
    app = app_for(FakeServed(), api_key="k")
    assert ask(app, "/openapi.json").status == 401
    found = ask(app, "/openapi.json", x_api_key="k").json()
    (scheme,) = found["components"]["securitySchemes"].values()
    assert scheme == {"type": "http", "scheme": "bearer"} and found["security"] == [{"key": []}]


def test_a_wrong_method_names_the_allowed_one():
    app = app_for(FakeServed())
    assert ask(app, "/tokenize", method="GET").headers["allow"] == "POST"


def test_schemathesis_finds_nothing(tmp_path, library):
    if importlib.util.find_spec("schemathesis") is None:
        pytest.skip("schemathesis is not installed (pip install schemathesis)")
    options = ("--ram", "160MiB", "--policy", "lru", "--ctx", "256", "--max-tokens", "8")
    with serving(tmp_path, *options) as served:
        command = ("-m", "schemathesis.cli", "run", served.url + "/openapi.json")
        more = ("--checks", ",".join(CHECKS), "--max-examples", "5", "--seed", "1")
        # A slow machine is not a finding.
        more += ("--suppress-health-check", "too_slow", "--request-timeout", "60")
        done = python(*command, *more, "--phases", "fuzzing", folder=tmp_path)
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


class Elements(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def elements():
    parser = Elements()
    parser.feed(PAGE)
    return parser.found


def test_the_page_needs_no_key_and_connects_only_to_its_server():
    app = app_for(FakeServed(), api_key="k")
    reply = ask(app, "/")
    assert reply.status == 200 and reply.body == PAGE.encode()
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    assert "connect-src 'self'" in reply.headers["content-security-policy"]
    assert reply.headers["x-dns-prefetch-control"] == "off"
    assert ask(app, "/experts").status == 401


def test_the_page_is_one_file():
    # The icon is a data URL. Its XML namespace is never fetched.
    assert not re.search(r"https?://(?!www.w3.org/2000/svg)|//cdn|@import|url\(", PAGE)
    for tag, attributes in elements():
        assert "src" not in attributes and tag not in ("iframe", "img"), tag
        if tag == "link":
            assert (attributes["href"] or "").startswith("data:")
        assert not any(name.startswith("on") for name in attributes), tag


def test_elements_have_names_for_screen_readers():
    found = elements()
    (html,) = (attributes for tag, attributes in found if tag == "html")
    assert html["lang"] == "en"
    for tag, attributes in found:
        # A field with a name is in an element `label`.
        if tag in ("textarea", "canvas", "aside", "nav") and "name" not in attributes:
            assert attributes.get("aria-label"), tag
        if tag == "canvas":
            assert attributes["role"] in ("img", "application"), tag
    assert any(attributes.get("role") == "log" for _, attributes in found)
    # Every id that the script uses exists.
    ids = {attributes["id"] for _, attributes in found if "id" in attributes}
    assert set(re.findall(r'\$\("(\w+)"\)', PAGE)) <= ids
