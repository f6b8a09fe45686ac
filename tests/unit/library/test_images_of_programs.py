"""Images that a program gives to `LLM.chat`."""

from io import BytesIO
from pathlib import Path

import pytest
from pictures import black, grey, url
from tables import cases

from orchestrator import ConfigError, MoeEdgeError
from orchestrator.library.images import with_images
from orchestrator.runtime.images import ImageLimits, image_part

LIMITS = ImageLimits(file_bytes=1 << 20, pixels=10**4)
TEXT, SEEN = {"type": "text", "text": "a"}, image_part(url(black()))
QUESTION = [{"role": "user", "content": "a"}]


class Pillow:
    """An image that has the part of the interface of Pillow's images that is used."""

    def __init__(self, mode="RGB", size=(4, 3)):
        self.mode, self.size = mode, size

    def convert(self, mode):
        return Pillow(mode, self.size)

    def save(self, buffer, kind):
        assert kind == "PNG" and self.mode in ("1", "L", "LA", "I;16", "P", "RGB", "RGBA")
        buffer.write(black())


@pytest.fixture
def path(tmp_path):
    (tmp_path / "a.png").write_bytes(black())
    return tmp_path / "a.png"


# Each takes the path of a file, and makes the images of a call.
GIVEN = {
    "a path": lambda path: path,
    "the text of a path": str,
    "bytes": lambda path: path.read_bytes(),
    "a bytearray": lambda path: bytearray(path.read_bytes()),
    "a memoryview": lambda path: memoryview(path.read_bytes()),
    "a data: URL": lambda _path: url(black()),
    "Pillow": lambda _path: Pillow(),
    "Pillow in CMYK": lambda _path: Pillow("CMYK"),
    "Pillow with 16 bits": lambda _path: Pillow("I;16"),
}


@pytest.mark.parametrize("kind", GIVEN)
def test_an_image_begins_the_last_message(kind, path):
    image = GIVEN[kind](path)
    before = [{"role": "system", "content": "b"}]
    made = with_images([*before, *QUESTION], [image, image], LIMITS)
    assert made == [*before, {"role": "user", "content": [SEEN, SEEN, TEXT]}]
    assert QUESTION == [{"role": "user", "content": "a"}]  # not changed
    assert with_images([{"role": "user", "content": ""}], [image], LIMITS)[0]["content"] == [SEEN]


def test_the_content_of_a_message_may_have_images(path):
    content = ["a", path, black(), Pillow(), TEXT, SEEN]
    (made,) = with_images([{"role": "user", "content": content}], [], LIMITS)
    assert made["content"] == [TEXT, SEEN, SEEN, SEEN, TEXT, SEEN]
    (jpeg,) = with_images([{"role": "user", "content": [grey()]}], [], LIMITS)
    assert jpeg["content"] == [image_part(url(grey(), "jpeg"))]
    (first,) = with_images([{"role": "user", "content": ["a"]}], [path], LIMITS)
    assert first["content"] == [SEEN, TEXT]
    assert with_images(QUESTION, [], None) == QUESTION


# (images, a part of the message).
@cases(
    "images, says",
    ([7], r"images\[0\] has the type int: give a path, the bytes of a PNG or JPEG"),
    ([None], r"images\[0\] has the type NoneType"),
    ([b"GIF89a"], r"images\[0\]: this is a GIF image: convert it"),
    ([black(), b""], r"images\[1\]: the image is empty"),
    (["/nowhere/a.png"], "/nowhere/a.png: No such file"),
    ([Path("/dev/null")], "/dev/null: not a regular file"),
    ([Pillow(size=(200, 200))], "200x200 pixels, and the limit is 10,000"),
    ([black(200, 200)], "200x200 pixels"),
    (["https://example.org/a.png"], "https:/example.org/a.png: No such file"),
)
def test_other_images_are_refused(images, says):
    with pytest.raises(MoeEdgeError, match=says):
        with_images(QUESTION, images, LIMITS)


def test_images_need_a_question_and_an_encoder():
    for messages in ([], [{"role": "assistant", "content": "a"}]):
        with pytest.raises(ConfigError, match="the last message must have the role"):
            with_images(messages, [black()], LIMITS)
    with pytest.raises(ConfigError, match="--mmproj FILE"):
        with_images(QUESTION, [black()], None)


def test_images_of_pillow():
    PIL = pytest.importorskip("PIL.Image", reason="Pillow is missing")
    for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "LAB", "I", "F"):
        (made,) = with_images(QUESTION, [PIL.new(mode, (5, 4))], LIMITS)
        assert made["content"][0]["image_url"]["url"].startswith("data:image/png;base64,iVBOR")
    buffer = BytesIO()
    PIL.new("CMYK", (5, 4)).save(buffer, "JPEG")
    (made,) = with_images(QUESTION, [buffer.getvalue()], LIMITS)
    assert made["content"][0]["image_url"]["url"].startswith("data:image/jpeg;base64,")
