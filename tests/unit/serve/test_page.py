"""The page: one file, no network, and nothing that only a mouse can reach."""

import re
from html.parser import HTMLParser

from asgi import ask
from fake_backend import FakeBackend, app_for

from orchestrator.serve.views import PAGE


class Elements(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def elements():
    parser = Elements()
    parser.feed(PAGE.read_text())
    return parser.found


def test_the_page_needs_no_key_and_may_speak_to_this_server_alone():
    app = app_for(FakeBackend(), api_key="k")
    reply = ask(app, "/")
    assert reply.status == 200 and reply.body == PAGE.read_bytes()
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    assert "connect-src 'self'" in reply.headers["content-security-policy"]
    assert ask(app, "/experts").status == 401


def test_the_page_is_one_file():
    text = PAGE.read_text()
    # The icon is in the page too, and its namespace is a name that nobody fetches.
    assert not re.search(r"https?://(?!www.w3.org/2000/svg)|//cdn|@import|url\(", text)
    for tag, attributes in elements():
        assert "src" not in attributes and tag not in ("iframe", "img"), tag
        if tag == "link":
            assert (attributes["href"] or "").startswith("data:")
        assert not any(name.startswith("on") for name in attributes), tag


def test_what_can_be_used_has_a_name_for_a_screen_reader():
    found = elements()
    (html,) = (attributes for tag, attributes in found if tag == "html")
    assert html["lang"] == "en"
    for tag, attributes in found:
        if tag in ("textarea", "canvas", "aside"):
            assert attributes.get("aria-label"), tag
        if tag == "canvas":
            assert attributes["role"] in ("img", "application"), tag
    assert any(attributes.get("role") == "log" for _, attributes in found)
    # What the script refers to is there.
    ids = {attributes["id"] for _, attributes in found if "id" in attributes}
    assert set(re.findall(r'\$\("(\w+)"\)', PAGE.read_text())) <= ids
