"""Images in the requests of each API: the form that llama.cpp gets, and refusals."""

import base64
import json

import pytest
from asgi import SAID, ask
from fake_served import FakeServed, app_for, assert_refused, whole
from paths import CHAT, COMPLETIONS, COUNT, MESSAGES, NATIVE, RESPONSES
from pictures import black, grey, url
from tables import cases

from orchestrator.config import Config
from orchestrator.runtime.images import ImageLimits, image_part
from orchestrator.serve.bodies import Words
from orchestrator.serve.served import body_limits, front_bytes
from orchestrator.serve.settings import IMAGE_BYTES, LEAST_BODY_BYTES, ServeSettings

LIMITS = ImageLimits(file_bytes=1 << 20, pixels=10**6, count=3)
BLACK, GRAY = black(), grey()
CODED = base64.b64encode(BLACK).decode()
TEXT, INPUT = {"type": "text", "text": "a"}, {"type": "input_text", "text": "a"}
SOURCE = {"type": "base64", "media_type": "image/png", "data": CODED}
BLOCK = {"type": "image", "source": SOURCE}
SEEN = image_part(url(BLACK))
ASKS_BLOCK = {"type": "input_image", "image_url": url(BLACK)}
CALL = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
CALLED = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
# A body whose text would be too long for the server, were it not an image.
LARGE = url(black(600, 600) + bytes(2**18))


class Seeing(FakeServed):
    """A model that takes images and counts 200 tokens for each, and 10 for a message."""

    images, most_image_bytes = LIMITS, 2**21

    def query(self, route, body=b""):
        if route.endswith("input_tokens"):
            n = 10 * body.count(b'"role"') + 200 * body.count(b"data:image")
            self.requests.insert(len(self.asked), whole(b'{"input_tokens": %d}' % n))
        return super().query(route, body)


def said(*parts, role="user"):
    return {"messages": [{"role": role, "content": [*parts]}]}


def given(path, data, served=None):
    """The request that llama.cpp gets."""
    served = served or Seeing(whole())
    reply = ask(app_for(served), path, data)
    assert served.asked, reply.body
    return json.loads(served.asked[-1][1])


# (path, request, the field that llama.cpp gets, its value).
@cases(
    "path, data, field, value",
    (CHAT, said(TEXT, image_part(CODED)), "messages", said(TEXT, SEEN)["messages"]),
    (CHAT, said(SEEN, role="tool"), "messages", said(SEEN, role="tool")["messages"]),
    (COUNT, said(BLOCK, TEXT), "messages", said(BLOCK, TEXT)["messages"]),
    (MESSAGES, said(BLOCK, TEXT), "messages", said(BLOCK, TEXT)["messages"]),
    (
        MESSAGES,
        said({"type": "tool_result", "tool_use_id": "a", "content": [TEXT, BLOCK]}, TEXT),
        "messages",
        [
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "a", "content": [TEXT, BLOCK]}],
            },
            *said(TEXT)["messages"],
        ],
    ),
    (
        RESPONSES,
        {"input": [{"role": "user", "content": [INPUT, {**ASKS_BLOCK, "detail": "high"}]}]},
        "input",
        [{"role": "user", "content": [INPUT, ASKS_BLOCK], "type": "message"}],
    ),
    (
        RESPONSES,
        {"input": [{"type": "function_call_output", "call_id": "a", "output": [ASKS_BLOCK]}]},
        "input",
        [{"type": "function_call_output", "call_id": "a", "output": [ASKS_BLOCK]}],
    ),
    (
        "/api/chat",
        {"messages": [{"role": "user", "content": "a", "images": [CODED, CODED]}]},
        "messages",
        said(SEEN, SEEN, TEXT)["messages"],
    ),
    (
        "/api/chat",
        {"messages": [{"role": "user", "images": [CODED]}]},
        "messages",
        said(SEEN)["messages"],
    ),
    ("/api/generate", {"prompt": "a", "images": [CODED]}, "messages", said(SEEN, TEXT)["messages"]),
)
def test_each_form_becomes_one_that_llama_cpp_reads(path, data, field, value):
    assert given(path, data)[field] == value


def test_the_declared_type_is_corrected():
    wrong = {"type": "image", "source": {**SOURCE, "media_type": "image/webp"}}
    assert given(MESSAGES, said(wrong, TEXT))["messages"] == said(BLOCK, TEXT)["messages"]
    coded = base64.b64encode(GRAY).decode()
    asked = {"messages": [{"role": "user", "images": [coded]}]}
    assert given("/api/chat", asked)["messages"] == said(image_part(url(GRAY, "jpeg")))["messages"]


ADDRESS = image_part("https://example.org/a.png")


# (path, request, a part of the sentence).
@cases(
    "path, data, says",
    (CHAT, said(ADDRESS), "messages[0].content[0]: the image is an address (https:)"),
    (RESPONSES, {"input": said({**ASKS_BLOCK, "image_url": "file:///a"})["messages"]}, "(file:)"),
    (MESSAGES, said({"type": "image", "source": {"type": "url", "url": "a"}}), "an address (url)"),
    (CHAT, said(SEEN, role="assistant"), "send images in messages of the user"),
    (CHAT, said(SEEN, role="system"), "send images in messages of the user"),
    (CHAT, said(*[SEEN] * 4), "4 images, and the limit is 3"),
    (
        CHAT,
        said(image_part(url(black(1001, 1000)))),
        "1001x1000 pixels, and the limit is 1,000,000",
    ),
    (CHAT, said(image_part(url(b"GIF89a"))), "this is a GIF image: convert it to PNG or JPEG"),
    (CHAT, said({"type": "input_audio", "input_audio": {}}), "audio and video are not supported"),
    (MESSAGES, said({"type": "document"}), "is not supported: send text or images"),
    (
        COMPLETIONS,
        {"prompt": {"prompt_string": "a", "multimodal_data": [CODED]}},
        "multimodal_data is not supported: send images to /v1/chat/completions",
    ),
    (
        NATIVE,
        {"prompt": ["a", {"prompt_string": "a", "multimodal_data": [CODED]}]},
        "multimodal_data is not supported",
    ),
    ("/apply-template", said(ADDRESS), "is an address"),
    (f"{CHAT}/input_tokens", said(ADDRESS), "is an address"),
)
def test_other_images_are_refused_in_one_sentence(path, data, says):
    served = Seeing()
    assert_refused(app_for(served), path, data, says)
    assert not served.asked


IMAGES = {
    CHAT: said(SEEN),
    MESSAGES: said(BLOCK),
    RESPONSES: {"input": said(ASKS_BLOCK)["messages"]},
    COUNT: said(BLOCK),
}


@pytest.mark.parametrize("path", IMAGES)
def test_a_model_without_an_encoder_names_the_option(path):
    assert_refused(app_for(FakeServed()), path, IMAGES[path], "reads text only: to send images")
    assert_refused(app_for(FakeServed()), path, IMAGES[path], "--mmproj FILE")


def test_images_have_a_limit_of_their_own_in_a_body():
    assert len(LARGE) > FakeServed.most_body_bytes
    assert given(CHAT, said(image_part(LARGE)))["messages"] == said(image_part(LARGE))["messages"]
    # PHP escapes slashes, and base64 has many.
    body = json.dumps(said(image_part(LARGE))).replace("/", "\\/").encode()
    assert given(CHAT, body)["messages"] == said(image_part(LARGE))["messages"]
    too_much = said(*[image_part(url(BLACK + bytes(2**20)))] * 2)
    assert_refused(app_for(Seeing()), CHAT, too_much, "--body-limit 4.12MiB", status=413)


# Texts and values that would take many times their length, if they were allowed that of images.
@cases(
    "body",
    json.dumps({"messages": SAID, "user": [1] * 2**17}).encode(),
    json.dumps({"messages": [{"role": "user", "content": "word " * 2**16}]}).encode(),
    json.dumps({"messages": [{"role": "user", "content": "a" * 2**18}]}).encode(),
    json.dumps({**said(SEEN), "user": "b" * 2**18}).encode(),
    json.dumps({**said({**SEEN, "note": "b" * 2**18})}).encode(),
    b'{"messages": ' + b"[" * 2**18,
)
def test_only_images_may_be_longer_than_text(body):
    served = Seeing()
    assert_refused(app_for(served), CHAT, body, "without its images", status=413)
    assert not served.asked


def test_an_image_is_not_tokenized_as_text_but_the_text_beside_it_is():
    class Wordy(Seeing):
        def count_tokens(self, text):
            return len(text), len(text)

    near = said({"type": "text", "text": "b" * 2**15}, image_part(LARGE))
    assert given(CHAT, near, Wordy(whole()))
    long = said({"type": "text", "text": "b" * 2**16}, image_part(LARGE))
    assert_refused(app_for(Wordy()), CHAT, long, "a prompt of 65588 tokens exceeds")


def test_an_image_counts_when_exchanges_are_dropped():
    turns = [said(TEXT, SEEN)["messages"][0], {"role": "assistant", "content": "b"}]
    messages = [*turns, *turns, *turns[:1]]
    served = Seeing(whole())
    asked = {"messages": messages, "overflow": "drop", "max_tokens": 10}
    assert given(CHAT, asked, served)["messages"] == messages[4:]
    # Without the images everything fits.
    plain = [{**each, "content": "a"} for each in messages]
    assert given(CHAT, {**asked, "messages": plain})["messages"] == plain


def test_clients_learn_that_the_model_takes_images():
    entry = {"id": "m", "meta": {"n_params": 7e9, "ftype": "Q8_0", "size": 5}}
    models = whole(json.dumps({"data": [entry]}).encode())
    props = whole(b'{"chat_template": "t"}')
    for kind, words in ((Seeing, {"completion", "tools", "vision"}), (FakeServed, None)):
        words = words or {"completion", "tools"}
        shown = ask(app_for(kind(models, props)), "/api/show", {"model": "m"}).json()
        assert set(shown["capabilities"]) == words
        (listed,) = ask(app_for(kind(models)), "/v1/models").json()["data"]
        assert set(listed["capabilities"]) == words and listed["id"] == "m"
        assert set(ask(app_for(kind(models)), "/v1/models/m").json()["capabilities"]) == words


def test_the_memory_of_images_is_reserved():
    config = Config.build(model="a.gguf", ctx=512)

    def reserved(images, **settings):
        return front_bytes(config, ServeSettings(**settings), Words("gpt2", ""), images)

    counted = LIMITS.request_bytes
    assert reserved(LIMITS) - reserved(None) == IMAGE_BYTES * (2 + 8 * 2) + counted
    more = reserved(LIMITS, parallel=3) - reserved(None, parallel=3)
    assert more == IMAGE_BYTES * (2 + 8 * 4) + counted


# (--body-limit, limit of a body's text, limit of its images).
@cases(
    "limit, text, images",
    (None, LEAST_BODY_BYTES, IMAGE_BYTES),
    (2**16, 2**16, 0),
    (2**25, LEAST_BODY_BYTES, 2**25 - LEAST_BODY_BYTES),
)
def test_the_body_limit_covers_text_and_images(limit, text, images):
    config, settings = Config.build(model="a.gguf", ctx=512), ServeSettings(body_limit=limit)
    assert body_limits(config, settings, LIMITS) == (text, images)
    assert body_limits(config, settings, None) == (limit or text, 0)
