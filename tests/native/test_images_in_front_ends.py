"""Answers about an image through each front end: official clients, Python and the terminal."""

import base64
import io
import json
import urllib.error

import image_models
import pytest
from browser import browsing
from command_line import MOE_EDGE, python
from image_models import FAMILIES
from page import asked, complaints, opened
from pictures import black, jpeg, scan, segment, url
from served import serving

from orchestrator import LLM, ConfigError

ASK = "Tell me about it."
N_TOKENS = 12
IMAGE = image_models.images()["wide.png"]
CODED = base64.b64encode(IMAGE).decode()
SIZES = {"ctx": 512, "threads": 1, "policy": "lru", "ram": "1300MiB"}
OPTIONS = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]
SEEN = {"type": "image_url", "image_url": {"url": url(IMAGE)}}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The files of a model and of its image encoder, which is found in the model's folder."""
    return image_models.write_model(next(iter(FAMILIES)), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def served(files, tmp_path_factory, library):
    folder = tmp_path_factory.mktemp("served")
    with serving(folder, "-m", str(files[0]), *OPTIONS, "--temp", "0") as server:
        yield server


@pytest.fixture(scope="module")
def answer(files, library):
    """The text of the answer, as `LLM` gives it."""
    with LLM(files[0], temp=0.0, **SIZES) as llm:
        text = llm.chat(ASK, images=[IMAGE], max_tokens=N_TOKENS).text
        # Every kind of image has the same bytes in the end.
        content = [{"role": "user", "content": [IMAGE, ASK]}]
        assert llm.chat(content, max_tokens=N_TOKENS).text == text
        other = llm.chat(ASK, images=[black(64, 64)], max_tokens=N_TOKENS).text
        assert other != text != llm.chat(ASK, max_tokens=N_TOKENS).text
        with pytest.raises(ConfigError, match="this is a GIF image"):
            llm.chat(ASK, images=[b"GIF89a"])
        opened = image_models.Image.open(io.BytesIO(IMAGE))
        assert llm.chat(ASK, images=[opened], max_tokens=N_TOKENS).text == text
    return text


def test_openais_client(served, answer):
    openai = pytest.importorskip("openai", reason="the openai package is missing")
    client = openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0)
    parts = [SEEN, {"type": "text", "text": ASK}]
    messages = [{"role": "user", "content": parts}]
    made = client.chat.completions.create(model="any", messages=messages, max_tokens=N_TOKENS)
    assert made.choices[0].message.content == answer
    parts = [
        {"type": "input_image", "image_url": url(IMAGE), "detail": "auto"},
        {"type": "input_text", "text": ASK},
    ]
    asked = [{"role": "user", "content": parts}]
    made = client.responses.create(model="any", input=asked, max_output_tokens=N_TOKENS)
    assert made.output_text == answer


def test_anthropics_client(served, answer):
    anthropic = pytest.importorskip("anthropic", reason="the anthropic package is missing")
    client = anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)
    source = {"type": "base64", "media_type": "image/png", "data": CODED}
    parts = [{"type": "image", "source": source}, {"type": "text", "text": ASK}]
    messages = [{"role": "user", "content": parts}]
    made = client.messages.create(model="any", messages=messages, max_tokens=N_TOKENS)
    assert made.content[0].text == answer


def test_ollamas_client(served, answer):
    ollama = pytest.importorskip("ollama", reason="the ollama package is missing")
    client = ollama.Client(served.url)
    assert "vision" in client.show("any").capabilities
    limit = {"num_predict": N_TOKENS}
    messages = [{"role": "user", "content": ASK, "images": [IMAGE]}]
    assert client.chat("any", messages, options=limit).message.content == answer
    assert client.generate("any", ASK, images=[IMAGE], options=limit).response == answer


def test_the_page(served, answer, tmp_path):
    """The page knows from /experts that the model takes images, and shows the button for them."""
    image = tmp_path / "wide.png"
    image.write_bytes(IMAGE)
    with browsing(tmp_path / "browser") as browser:
        tab = opened(browser, served.url)
        tab.until("$('attach').checkVisibility()")
        found = tab.call("Runtime.evaluate", expression="$('files')")["result"]["objectId"]
        tab.call("DOM.setFileInputFiles", files=[str(image)], objectId=found)
        tab.until("attached.reading === 0 && attached.urls.length === 1")
        tab.value(f"conversation.settings = {{ max_tokens: {N_TOKENS} }}")
        asked(tab, ASK)
        tab.until("!running && messages.length === 2")
        assert tab.value("messages[1].content") == answer
        assert complaints(tab) == []


def test_the_terminal(files, answer, tmp_path):
    image = tmp_path / "wide.png"
    image.write_bytes(IMAGE)
    command = ["chat", "-m", files[0], *OPTIONS, "--temp", 0, "--max-tokens", N_TOKENS, "--json"]
    done = python(*MOE_EDGE, *command, "-p", ASK, "--image", image, XDG_CACHE_HOME=str(tmp_path))
    assert json.loads(done.stdout)["text"] == answer, done.stderr
    done = python(*MOE_EDGE, *command, "-p", ASK, "--image", image, "--mmproj", "none")
    assert done.returncode == 1 and "this model reads text only" in done.stderr


def test_a_file_that_only_stb_image_refuses_is_a_sentence(served):
    """Its structure is right, but a code of its pixels does not exist."""
    frame = b"\x08\0\x40\0\x40\1\1\x11\0"
    code = segment(0xC4, b"\0" + bytes(15) + b"\1\0")  # a single code of 16 bits
    odd = url(jpeg(segment(0xC0, frame), code, scan(), b"\xff\0" * 64))
    image = {"type": "image_url", "image_url": {"url": odd}}
    data = {"messages": [{"role": "user", "content": [image, {"type": "text", "text": ASK}]}]}
    with pytest.raises(urllib.error.HTTPError) as caught:
        served.post("/v1/chat/completions", data)
    assert caught.value.code == 400
    assert "Failed to load image" in json.load(caught.value)["error"]["message"]
