"""Images on the page: attached, kept with the conversation, and sent as content parts."""

import base64
import json

import pytest
from page import BREAK, Model, all_have_names, asked, complaints, opened
from tables import cases

LIMITS = {"bytes": 60_000, "pixels": 1_000_000, "count": 3}
SVG = "<svg xmlns='http://www.w3.org/2000/svg' width='30' height='20'><rect width='9' height='9'/>"
SVG += "</svg>"
# drawn(width, height, type): a File that the browser has drawn. noise(side): a small WebP that is a
# large PNG. given(kind, files, target): paste or drop files.
SCRIPT = """
const drawn = (width, height, type, name) => new Promise((done) => {
  const canvas = Object.assign(document.createElement("canvas"), { width, height });
  const context = canvas.getContext("2d");
  context.fillStyle = "#c33";
  context.fillRect(0, 0, width / 2, height);
  canvas.toBlob((blob) => done(new File([blob], name || "drawn", { type: blob.type })), type);
});
const noise = (side) => new Promise((done) => {
  const canvas = Object.assign(document.createElement("canvas"), { width: side, height: side });
  const pixels = new ImageData(side, side), { data } = pixels;
  for (let i = 0; i < data.length; i += 16384) crypto.getRandomValues(data.subarray(i, i + 16384));
  canvas.getContext("2d").putImageData(pixels, 0, 0);
  canvas.toBlob((blob) => done(new File([blob], "noise.webp")), "image/webp", 0.3);
});
function given(kind, files, target = document.activeElement, texts = {}) {
  const data = new DataTransfer();
  for (const file of files) data.items.add(file);
  for (const [type, text] of Object.entries(texts)) data.setData(type, text);
  const how = { bubbles: true, cancelable: true, clipboardData: data, dataTransfer: data };
  target.dispatchEvent(kind === "paste" ? new ClipboardEvent(kind, how) : new DragEvent(kind, how));
}
const isRead = () => attached.reading === 0;
"""


@pytest.fixture
def model():
    model = Model()
    model.images = LIMITS
    yield model
    model.close()


@pytest.fixture
def tab(browser, model):
    tab = opened(browser, model.url)
    tab.value(SCRIPT)
    tab.until("limits")
    yield tab
    assert complaints(tab) == []
    urls = {event["request"]["url"] for event in tab.events("Network.requestWillBeSent")}
    assert all(url.startswith((model.url, "data:")) for url in urls)


def attach(tab, files, how="drop", n=1, target="document.activeElement"):
    """Attach files, given as a JavaScript expression, and wait until the question has n images."""
    tab.value(f"(async () => given('{how}', await Promise.all([{files}]), {target}))()")
    tab.until(f"isRead() && attached.urls.length === {n}")


def answered(tab, n):
    tab.until(f"!running && messages.length === {n} && !messages[{n - 1}].end")


def loaded_anew(tab):
    tab.value("window.before = true")
    tab.call("Page.reload")
    tab.until("!window.before && document.readyState === 'complete'")
    tab.until("typeof conversation !== 'undefined' && conversation !== null && limits")


def press(tab, name):
    tab.value(
        "[...document.querySelectorAll('button')].filter((each) => each.checkVisibility() && "
        f"[each.innerText, each.ariaLabel].includes('{name}')).pop().click()"
    )


def parts_of(message):
    """The texts and the kinds of images in a message of a request."""
    if isinstance(message["content"], str):
        return [message["content"]]
    return [
        each["text"] if each["type"] == "text" else each["image_url"]["url"].split(";")[0][5:]
        for each in message["content"]
    ]


def test_images_are_sent_and_survive_a_reload(tab, model):
    attach(tab, "drawn(40, 30, 'image/png'), drawn(40, 30, 'image/jpeg')", n=2)
    attach(tab, "drawn(40, 30, 'image/webp')", how="paste", n=3)
    assert tab.value("document.querySelectorAll('#attached img').length") == 3
    png = tab.value("attached.urls[0]")
    asked(tab, "What is this?")
    answered(tab, 2)
    (sent,) = model.requests[-1]["messages"]
    # A PNG and a JPEG are sent unchanged, others as PNG.
    assert parts_of(sent) == ["image/png", "image/jpeg", "image/png", "What is this?"]
    assert sent["content"][0]["image_url"]["url"] == png
    for part in sent["content"][:3]:
        data = base64.b64decode(part["image_url"]["url"].partition(",")[2], validate=True)
        assert data.startswith((b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"))
    assert tab.value("attached.urls.length") == 0 and tab.value("$('attached').hidden")
    loaded_anew(tab)
    shown = "document.querySelectorAll('.user img')"
    assert tab.value(f"{shown}.length") == 3
    tab.until(f"[...{shown}].every((each) => each.naturalWidth === 40)")
    press(tab, "Regenerate")
    tab.until("!running && known.size === 3")
    asked(tab, "And now?")
    answered(tab, 4)
    said = model.requests[-1]["messages"]
    assert said[0] == model.requests[0]["messages"][0] and parts_of(said[2]) == ["And now?"]


def test_a_file_is_sent_byte_for_byte(tab, model, tmp_path):
    """Also one whose name lies about its type, chosen by the button."""
    data = base64.b64decode(
        tab.value("drawn(9, 9, 'image/jpeg').then(dataUrl).then((url) => url.split(',')[1])")
    )
    (tmp_path / "photo.png").write_bytes(data)
    found = tab.call("Runtime.evaluate", expression="$('files')")["result"]["objectId"]
    tab.call("DOM.setFileInputFiles", files=[str(tmp_path / "photo.png")], objectId=found)
    tab.until("isRead() && attached.urls.length === 1")
    tab.value("$('form').requestSubmit()")  # an image alone is a question
    answered(tab, 2)
    (part,) = model.requests[-1]["messages"][0]["content"]
    kind, _, text = part["image_url"]["url"].partition(",")
    assert kind == "data:image/jpeg;base64" and base64.b64decode(text) == data
    assert tab.value("conversation.title") == "Image"
    assert not tab.value("document.querySelector('.user .text').checkVisibility()")


def test_an_image_can_be_removed_and_enlarged(tab, model):
    attach(tab, "drawn(10, 10, 'image/png'), drawn(20, 20, 'image/png')", n=2)
    press(tab, "Remove image 1 of 2")
    assert tab.value("attached.urls.length") == 1
    tab.until("document.querySelector('#attached img').naturalWidth === 20")
    press(tab, "Enlarge image 1 of 1")
    assert tab.value("document.querySelector('#attached li').className") == "large"
    press(tab, "Remove image 1 of 1")
    tab.value("$('form').requestSubmit()")
    assert model.requests == [] and tab.value("$('attached').hidden")


def test_an_edited_question_keeps_its_images(tab, model):
    attach(tab, "drawn(10, 10, 'image/png'), drawn(20, 20, 'image/png')", n=2)
    asked(tab, "First?")
    answered(tab, 2)
    press(tab, "Edit")
    tab.until("document.activeElement.closest('.editing')")
    press(tab, "Remove image 1 of 2")
    tab.value("(async () => given('paste', [await drawn(30, 30, 'image/png')]))()")
    edited = "document.querySelector('.editing').attached.urls.length"
    tab.until(f"{edited} === 2")
    assert tab.value("attached.urls.length") == 0
    tab.value("document.activeElement.value = 'Second?'")
    tab.press("Enter")
    answered(tab, 2)
    (sent,) = model.requests[-1]["messages"]
    assert parts_of(sent) == ["image/png", "image/png", "Second?"]
    tab.until(
        "[...document.querySelectorAll('.user img')].map((e) => e.naturalWidth).join() === '20,30'"
    )
    press(tab, "Previous version")
    tab.until(
        "[...document.querySelectorAll('.user img')].map((e) => e.naturalWidth).join() === '10,20'"
    )
    press(tab, "Edit")
    tab.press("Escape")
    assert tab.value("document.querySelector('.user .images').checkVisibility()")


@cases(
    "file, says",
    (
        "drawn(2000, 1000, 'image/png', 'big')",
        "big has 2.0 million pixels. The limit is 1.0 million.",
    ),
    (
        "drawn(2000, 1000, 'image/webp', 'big')",
        "big has 2.0 million pixels. The limit is 1.0 million.",
    ),
    ("noise(400)", "as it would be sent. The limit is 0.1 MiB."),
    (
        "new File([new Uint8Array(70000)], 'a.txt')",
        "a.txt is not an image that this browser can read. ",
    ),
    (
        "new File([Uint8Array.of(137, 80, 78, 71, 13, 10, 26, 10), new Uint8Array(70000)], 'a')",
        "a has 0.1 MiB as it would be sent.",
    ),
    (
        "new File([Uint8Array.of(137, 80, 78, 71, 13, 10, 26, 10)], 'cut.png')",
        "cut.png is not an image",
    ),
    ("new File([], 'empty.png', { type: 'image/png' })", "empty.png is not an image"),
    ("new File([new Uint8Array(2 ** 26 + 1)], 'huge')", "huge has 64.0 MiB. The page reads up to"),
)
def test_a_wrong_file_is_explained(tab, model, file, says):
    attach(tab, file, n=0)
    tab.until("!$('status').innerText.startsWith('Reading')")
    assert says in tab.value("$('status').innerText")


def test_only_so_many_images_are_taken(tab, model):
    attach(tab, ", ".join(["drawn(5, 5, 'image/gif')"] * 4), n=3)
    assert tab.value("$('status').innerText") == "A question can have at most 3 images."
    asked(tab, "One?")
    answered(tab, 2)
    attach(tab, f"new File([{json.dumps(SVG)}], 'a.svg', {{ type: 'image/svg+xml' }})")
    asked(tab, "Two?")
    answered(tab, 4)
    # The oldest image of the conversation is left out, and the page says so.
    first, _, last = model.requests[-1]["messages"]
    assert parts_of(first) == ["image/png"] * 2 + ["One?"] and parts_of(last)[0] == "image/png"
    costs = "[...document.querySelectorAll('.costs')].map((each) => each.innerText)"
    assert "image" not in tab.value(costs)[0]
    assert tab.value(costs)[1] == "the model did not get 1 image"


def test_a_model_without_images_gets_none(browser, model):
    tab = opened(browser, model.url)
    tab.value(SCRIPT)
    tab.until("limits")
    attach(tab, "drawn(5, 5, 'image/png')")
    asked(tab, "Seen?")
    answered(tab, 2)
    model.images = None
    loaded = "window.before = true"
    tab.value(loaded)
    tab.call("Page.reload")
    tab.until(
        "!window.before && typeof limits !== 'undefined' && limits === null && messages.length"
    )
    tab.value(SCRIPT)
    assert not tab.value("$('attach').checkVisibility()")
    attach(tab, "drawn(5, 5, 'image/png')", n=0)
    assert tab.value("$('status').innerText") == "The model takes no images."
    asked(tab, "Still?")
    answered(tab, 4)
    assert [each["content"] for each in model.requests[-1]["messages"]] == [
        "Seen?",
        "Yes.",
        "Still?",
    ]
    assert "the model did not get 1 image" in tab.value(
        "document.querySelectorAll('.costs')[1].innerText"
    )
    assert complaints(tab) == []


def test_pasted_text_stays_text(tab):
    """Office programs put a picture of a text next to the text."""
    office = "{ 'text/plain': 'a', 'text/html': '<b>a</b>' }"
    tab.value(
        f"(async () => given('paste', [await drawn(5, 5, 'image/png')], $('text'), {office}))()"
    )
    tab.value("given('paste', [], $('text'), { 'text/plain': 'a' })")
    assert tab.value("isRead()") and tab.value("attached.urls.length") == 0


def test_an_answer_with_images_survives_a_reload(tab, model):
    """The browser's small storage for answers in progress would not hold the images."""
    model.images = {**LIMITS, "bytes": 2**24}
    tab.until("limits.bytes > 2 ** 20")
    model.pieces = ["Half", BREAK]
    big = "new File([await drawn(9, 9, 'image/png'), new Uint8Array(8e6)], 'big.png')"
    tab.value(f"(async () => given('drop', [{big}]))()")
    tab.until("isRead() && attached.urls.length === 1")
    asked(tab, "Large?")
    tab.until("!running && messages.length === 2")
    loaded_anew(tab)
    assert tab.value("messages.map((each) => each.content).join('|')") == "Large?|Half"
    assert tab.value("messages[0].images[0].length") > 8e6
    model.pieces = [" and half."]
    press(tab, "Continue")
    answered(tab, 2)
    assert tab.value("messages[1].content") == "Half and half."
    assert len(model.requests[-1]["messages"][0]["content"][0]["image_url"]["url"]) > 8e6


def test_images_fit_a_narrow_window_and_have_names(tab, model):
    tab.shape(400, 700)
    attach(
        tab,
        "drawn(900, 300, 'image/png'), drawn(20, 900, 'image/jpeg'), drawn(5, 5, 'image/webp')",
        n=3,
    )
    all_have_names(tab)
    assert tab.value("document.documentElement.scrollWidth") <= 400
    asked(tab, "Wide?")
    answered(tab, 2)
    press(tab, "Enlarge image 1 of 3")
    assert tab.value("document.documentElement.scrollWidth") <= 400
    assert tab.value("$('log').scrollWidth <= $('log').clientWidth")
    press(tab, "Edit")
    all_have_names(tab)
    assert tab.value("document.documentElement.scrollWidth") <= 400
