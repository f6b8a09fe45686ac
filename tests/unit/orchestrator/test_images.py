"""Images that users and clients send: what is accepted, and one sentence for every other file."""

import base64
import tracemalloc
import zlib

import pytest
from pictures import (
    CHANNELS,
    CODES,
    EOI,
    GREY,
    GREY_ALPHA,
    PALETTE,
    PNG_START,
    QUANTIZERS,
    RGB,
    RGBA,
    SOI,
    black,
    chunk,
    codes,
    frame,
    grey,
    header,
    jpeg,
    png,
    rows,
    scan,
    segment,
    url,
)
from tables import cases

from orchestrator.errors import ConfigError
from orchestrator.runtime.image_files import decode_bytes, inspect
from orchestrator.runtime.images import (
    ImageLimits,
    has_images,
    image_part,
    read_image,
    settle_images,
)

LIMITS = ImageLimits()
IHDR, IDAT = chunk(b"IHDR", header(4, 3)), chunk(b"IDAT", rows(4, 3))
COLORS = chunk(b"PLTE", bytes(6))
BLACK, GRAY = black(), grey()
SMALL = ImageLimits(file_bytes=1 << 20, pixels=10**6, count=3, decode_bytes=1 << 22)


def bombed(width, height, n_bytes, depth=8, color=RGB, interlace=0):
    """A PNG whose pixels decompress to n_bytes, in one chunk."""
    packer = zlib.compressobj(9)
    piece = bytes(1 << 20)
    packed = [packer.compress(piece) for _ in range(n_bytes >> 20)]
    packed += [packer.compress(bytes(n_bytes & 0xFFFFF)), packer.flush()]
    head = chunk(b"IHDR", header(width, height, depth, color, interlace=interlace))
    return png(head, chunk(b"IDAT", b"".join(packed)))


def headed(*args, **more):
    """A PNG with this header and the pixels of a small image."""
    return png(chunk(b"IHDR", header(*args, **more)), IDAT)


def framed(*args, marker=0xC0, **more):
    """A JPEG with this frame header and some pixels."""
    return jpeg(QUANTIZERS, segment(marker, frame(*args, **more)), CODES, scan(), codes(2))


def interlaced(width, height, n_bytes):
    """A PNG with Adam7's passes, of n_bytes in all."""
    return bombed(width, height, n_bytes, color=GREY, interlace=1)


# (file, its size as text).
@cases(
    "data, size",
    *((black(5, 4, depth, GREY), "5x4") for depth in (1, 2, 4, 8, 16)),
    *((black(5, 4, depth, color), "5x4") for depth in (8, 16) for color in (RGB, RGBA, GREY_ALPHA)),
    *((black(5, 4, depth, PALETTE, COLORS), "5x4") for depth in (1, 2, 4, 8)),
    (black(4, 3, 8, PALETTE, COLORS, chunk(b"tRNS", b"\0")), "4x3"),
    (black(4, 3, 16, RGB, chunk(b"tRNS", bytes(6))), "4x3"),
    (black(4, 3, 8, RGB, chunk(b"tEXt", b"a\0b", crc=7)), "4x3"),
    (black(1, 1), "1x1"),
    (interlaced(8, 8, 64 + 15), "8x8"),
    (interlaced(1, 1, 2), "1x1"),
    (png(IHDR, *(chunk(b"IDAT", bytes((each,))) for each in rows(4, 3))), "4x3"),
    (BLACK + b"trailing data", "4x3"),
    (GRAY, "16x8"),
    (grey(333, 97), "333x97"),
    (grey(16, 8, marker=0xC1), "16x8"),
    (grey(16, 8, segment(0xE1, b"Exif" + SOI + EOI), segment(0xFE, b"a")), "16x8"),
    (GRAY + b"a video of a phone", "16x8"),
    (SOI + b"\xff\xff" + GRAY[3:], "16x8"),
    (jpeg(segment(0xC2, frame(9, 9, (0x22, 0x11, 0x11))), scan(3), codes(6), scan(3)), "9x9"),
)
def test_an_ordinary_file_is_accepted(data, size):
    image = inspect(data, LIMITS, "a.png")
    assert image.size == size and image.n_bytes == len(data)
    assert image.stb_bytes >= image.rgb_bytes
    assert decode_bytes([image]) >= 2 * image.rgb_bytes


HOSTILE = {
    # Sizes.
    "64k x 64k PNG": (headed(65535, 65535), "65535x65535 pixels, and the limit is 33,554,432"),
    "64k x 64k JPEG": (framed(65535, 65535), "65535x65535 pixels"),
    "2G x 2G PNG": (headed(2**31 - 1, 2**31 - 1), "2147483647x2147483647 pixels"),
    "4G x 4G PNG": (headed(2**32 - 1, 2**32 - 1), "4294967295x4294967295 pixels"),
    "4G x 1 PNG": (headed(2**32 - 1, 1), "4294967295x1 pixels"),
    "1 x 4G PNG": (headed(1, 2**32 - 1), "1x4294967295 pixels"),
    "0 x 3 PNG": (headed(0, 3), "it has 0x3 pixels"),
    "4 x 0 PNG": (headed(4, 0), "it has 4x0 pixels"),
    "0 x 3 JPEG": (framed(0, 3), "it has 0x3 pixels"),
    "height given later JPEG": (framed(4, 0), "it has 4x0 pixels"),
    "16-bit RGBA above the memory": (headed(5000, 5000, 16, RGBA), "of memory, and the limit"),
    "interlaced above the memory": (headed(4000, 4000, 16, RGBA, interlace=1), "of memory"),
    "progressive above the memory": (framed(5700, 5700, (0x11,) * 3, marker=0xC2), "of memory"),
    "narrow, padded by its sampling": (
        framed(1, 65535, (0x44, 0x11, 0x11), marker=0xC2)[:-2],
        "at most 64 times as long",
    ),
    "file above the limit": (bytes(LIMITS.file_bytes + 1), "12.1 MiB, and the limit is 12 MiB"),
    # Bombs.
    "1 x 1 with 64 MiB": (bombed(1, 1, 1 << 26), "the file has more data than 1x1 pixels"),
    "one row too many": (bombed(4, 3, 52), "the file has more data than 4x3 pixels"),
    "interlaced with too much": (interlaced(8, 8, 80), "the file has more data than 8x8 pixels"),
    "bomb in many chunks": (
        png(IHDR, *[chunk(b"IDAT", zlib.compress(bytes(1 << 20)))] * 3),
        "the file has more data than 4x3 pixels",
    ),
    "too many chunks": (png(IHDR, chunk(b"tEXt") * 70_000, IDAT), "more than 65536 PNG chunks"),
    "too many scans": (
        jpeg(segment(0xC2, frame(16, 8)), *[scan() + b"\0"] * 101),
        "the file has more than 100 JPEG scans",
    ),
    "too many segments": (jpeg(segment(0xFE) * 70_000), "more than 65536 JPEG segments"),
    # Incomplete files.
    **{
        f"PNG cut to {n} bytes": (BLACK[:n], "incomplete")
        for n in (1, 4, 7, 8, 12, 20, 32, 33, 37, 44, 48, 56, 57, 61, 65, 68)
    },
    **{
        f"JPEG cut to {n} bytes": (GRAY[:n], "incomplete")
        for n in (1, 2, 3, 4, 20, 71, 75, 80, 90, 100, 128, 138, 139, 140)
    },
    "PNG without IEND": (png(IHDR, IDAT, end=False), "the PNG chunk IEND is missing"),
    "PNG without pixels": (png(IHDR), "the file has no pixels"),
    "PNG with half its pixels": (
        png(IHDR, chunk(b"IDAT", rows(4, 3)[:-6])),
        "pixels are missing",
    ),
    "PNG with too few rows": (png(IHDR, chunk(b"IDAT", rows(4, 2))), "pixels are missing"),
    "PNG with an empty IDAT": (png(IHDR, chunk(b"IDAT")), "pixels are missing"),
    "JPEG without pixels": (jpeg(QUANTIZERS, segment(0xC0, frame(4, 3))), "the file has no pixels"),
    "JPEG without its end": (GRAY[:-2], "the JPEG end marker is missing"),
    # Damaged PNG.
    "IHDR is not first": (png(chunk(b"tEXt", b"a\0b"), IHDR, IDAT), "not a valid IHDR"),
    "iPhone's own PNG": (png(chunk(b"CgBI", bytes(4)), IHDR, IDAT), "not a valid IHDR"),
    "no IHDR": (png(IDAT), "not a valid IHDR"),
    "IHDR of 12 bytes": (png(chunk(b"IHDR", header(4, 3)[:-1]), IDAT), "not a valid IHDR"),
    "IHDR of 14 bytes": (png(chunk(b"IHDR", header(4, 3) + b"\0"), IDAT), "not a valid IHDR"),
    "two IHDR": (png(IHDR, IHDR, IDAT), "the unknown PNG chunk IHDR"),
    "wrong CRC of IHDR": (
        png(chunk(b"IHDR", header(4, 3), crc=1), IDAT),
        "chunk IHDR has a wrong checksum",
    ),
    "wrong CRC of IDAT": (
        png(IHDR, chunk(b"IDAT", rows(4, 3), crc=1)),
        "chunk IDAT has a wrong checksum",
    ),
    "wrong CRC of PLTE": (
        black(4, 3, 8, RGB, chunk(b"PLTE", b"abc", crc=1)),
        "chunk PLTE has a wrong checksum",
    ),
    "size changed after the CRC": (
        BLACK[:19] + b"\x09" + BLACK[20:],
        "chunk IHDR has a wrong checksum",
    ),
    "length of 4 GiB": (
        PNG_START + IHDR + b"\xff\xff\xff\xffIDAT" + rows(4, 3),
        "the file ends within the chunk IDAT",
    ),
    "length of 2 GiB": (PNG_START + b"\x7f\xff\xff\xffIHDR" + bytes(40), "within the chunk IHDR"),
    "type that is no word": (
        png(IHDR, chunk(b"\0\1\2\3"), IDAT),
        "a PNG chunk has an invalid type",
    ),
    "unknown critical chunk": (png(IHDR, chunk(b"EVIL"), IDAT), "the unknown PNG chunk EVIL"),
    "depth 3": (headed(4, 3, 3, GREY), "unknown values"),
    "palette of 16 bits": (headed(4, 3, 16, PALETTE), "unknown values"),
    "RGB of 4 bits": (headed(4, 3, 4, RGB), "unknown values"),
    "colour type 5": (headed(4, 3, 8, 5), "unknown values"),
    "colour type 255": (headed(4, 3, 8, 255), "unknown values"),
    "compression 1": (headed(4, 3, method=1), "unknown values"),
    "filter method 1": (headed(4, 3, filtering=1), "unknown values"),
    "interlace 2": (headed(4, 3, interlace=2), "unknown values"),
    "no palette": (black(4, 3, 8, PALETTE), "it has no palette"),
    "palette of 257 colours": (
        black(4, 3, 8, PALETTE, chunk(b"PLTE", bytes(771))),
        "its palette is wrong",
    ),
    "palette of 2 bytes": (black(4, 3, 8, PALETTE, chunk(b"PLTE", b"ab")), "its palette is wrong"),
    "palette after the pixels": (png(IHDR, IDAT, COLORS), "its palette is wrong"),
    "tRNS above the palette": (
        black(4, 3, 8, PALETTE, COLORS, chunk(b"tRNS", bytes(3))),
        "its transparency is wrong",
    ),
    "tRNS beside alpha": (
        black(4, 3, 8, RGBA, chunk(b"tRNS", bytes(6))),
        "its transparency is wrong",
    ),
    "tRNS after the pixels": (
        png(IHDR, IDAT, chunk(b"tRNS", bytes(6))),
        "its transparency is wrong",
    ),
    "pixels that are no zlib": (png(IHDR, chunk(b"IDAT", b"not zlib")), "be decompressed"),
    "zlib with a dictionary": (
        png(IHDR, chunk(b"IDAT", b"\x78\xbb\0\0\0\1" + bytes(9))),
        "be decompressed",
    ),
    "wrong checksum of the pixels": (
        png(IHDR, chunk(b"IDAT", rows(4, 3)[:-1] + b"\7")),
        "be decompressed",
    ),
    # Damaged JPEG, and kinds of JPEG that stb_image does not decode.
    "lossless JPEG": (framed(4, 3, marker=0xC3), "this is a lossless JPEG"),
    "arithmetic JPEG": (framed(4, 3, marker=0xC9), "this is an arithmetic-coded JPEG"),
    "hierarchical JPEG": (framed(4, 3, marker=0xC5), "this is a hierarchical JPEG"),
    "12-bit JPEG": (framed(4, 3, marker=0xC1, bits=12), "this is a 12-bit JPEG"),
    "no SOF": (jpeg(QUANTIZERS, CODES), "it has no header"),
    "pixels before SOF": (jpeg(scan(), b"\0", segment(0xC0, frame(4, 3))), "before the header"),
    "two SOF": (
        jpeg(segment(0xC0, frame(4, 3)), segment(0xC0, frame(60000, 500)), scan(), b"\0"),
        "two headers",
    ),
    "SOF too short": (jpeg(segment(0xC0, b"\x08\0\1"), scan(), b"\0"), "its header is too short"),
    "2 components": (framed(4, 3, (0x11, 0x11)), "its header has 2 colours"),
    "0 components": (framed(4, 3, ()), "its header has 0 colours"),
    "5 components": (framed(4, 3, (0x11,) * 5), "its header has 5 colours"),
    "4 components, 3 given": (framed(4, 3, (0x11,) * 3, n_components=4), "has 4 colours"),
    "sampling 0": (framed(4, 3, (0x01,)), "wrong colour sampling factors"),
    "sampling 5": (framed(4, 3, (0x51,)), "wrong colour sampling factors"),
    "sampling 3 and 2": (framed(4, 3, (0x31, 0x21, 0x11)), "wrong colour sampling factors"),
    "length 0": (jpeg(segment(0xE0, b"", 0)), "a JPEG segment has an invalid length"),
    "length 1": (jpeg(segment(0xE0, b"", 1)), "a JPEG segment has an invalid length"),
    "length beyond the file": (jpeg(segment(0xE0, b"", 65535)), "the file ends within the header"),
    "restart interval of 3 bytes": (jpeg(segment(0xDD, b"abc")), "the JPEG tables are wrong"),
    "quantizers that are cut off": (jpeg(segment(0xDB, bytes(64))), "tables are wrong"),
    "quantizers of 16 bits, 64 bytes": (jpeg(segment(0xDB, bytes([16, *range(64)]))), "tables"),
    "quantizers of number 4": (jpeg(segment(0xDB, bytes([4, *range(64)]))), "tables are wrong"),
    "codes of kind 2": (jpeg(segment(0xC4, b"\x20" + b"\1" + bytes(16))), "tables are wrong"),
    "codes of number 4": (jpeg(segment(0xC4, b"\4" + b"\1" + bytes(16))), "tables are wrong"),
    "more codes than a length has": (
        jpeg(segment(0xC4, b"\0\3" + bytes(18))),
        "the JPEG tables are wrong",
    ),
    "codes without their values": (jpeg(segment(0xC4, b"\0\1" + bytes(15))), "tables are wrong"),
    "scan of no component": (
        jpeg(segment(0xC0, frame(4, 3)), segment(0xDA, b"\0\0\x3f\0"), b"\0"),
        "a JPEG scan has an invalid header",
    ),
    "scan of five bytes": (
        jpeg(segment(0xC0, frame(4, 3)), segment(0xDA, b"\1\1\0\0\0"), b"\0"),
        "a JPEG scan has an invalid header",
    ),
    "one colour of three": (
        jpeg(segment(0xC0, frame(4, 3, (0x11,) * 3)), scan(1), b"\0"),
        "pixels of a colour channel are missing",
    ),
    "refinement without a first scan": (
        jpeg(segment(0xC2, frame(4, 3)), segment(0xDA, b"\1\1\0\0\0\x10"), b"\0"),
        "pixels of a colour channel are missing",
    ),
    "SOI inside": (jpeg(SOI, segment(0xC0, frame(4, 3))), "the JPEG marker D8 is misplaced"),
    "unknown marker": (jpeg(segment(0xB0, b"a")), "the file has the unknown JPEG marker B0"),
    "escaped byte as a marker": (SOI + b"\xff\xff\0abc", "marker 00 is misplaced"),
    # Other types.
    "GIF": (b"GIF89a" + bytes(20), "this is a GIF image: convert it to PNG or JPEG"),
    "WebP": (b"RIFF\0\0\0\0WEBPVP8 ", "this is a WebP image"),
    "BMP": (b"BM" + bytes(60), "this is a BMP image"),
    "TIFF": (b"II*\0" + bytes(60), "this is a TIFF image"),
    "HEIC": (b"\0\0\0\x18ftypheic", "this is a HEIC image"),
    "AVIF": (b"\0\0\0\x18ftypavif", "this is an AVIF image"),
    "JPEG XL": (b"\xff\x0a" + bytes(20), "this is a JPEG XL image"),
    "JPEG 2000": (b"\0\0\0\x0cjP  \r\n\x87\n", "this is a JPEG 2000 image"),
    "icon": (b"\0\0\1\0\1\0", "this is an icon (ICO)"),
    "Photoshop": (b"8BPS\0\1", "this is a Photoshop image"),
    "SVG": (b'<?xml version="1.0"?>\n<svg/>', "this is an SVG image"),
    "SVG without a declaration": (b"\n<svg xmlns='a'/>", "this is an SVG image"),
    "PDF": (b"%PDF-1.7\n", "this is a PDF file"),
    "web page": (b"<!DOCTYPE HTML><p>", "this is a web page"),
    "video": (b"\0\0\0\x18ftypisom", "this is a video"),
    "WebM": (b"\x1a\x45\xdf\xa3webm", "this is a video"),
    "sound": (b"RIFF\0\0\0\0WAVEfmt ", "this is a sound file"),
    "MP3": (b"ID3\4\0", "this is a sound file"),
    "ZIP": (b"PK\3\4" + bytes(9), "this is a ZIP archive"),
    "text": (b"hello", "this is neither PNG nor JPEG"),
    "PNG after a letter": (b"a" + BLACK, "this is neither PNG nor JPEG"),
    "nothing": (b"", "the image is empty"),
    "zeros": (bytes(4096), "this is neither PNG nor JPEG"),
}


def test_there_are_a_hundred_hostile_files():
    assert len(HOSTILE) >= 100


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_gets_one_sentence_and_takes_little_memory(name):
    data, says = HOSTILE[name]
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError) as caught:
            inspect(data, LIMITS, "a.png")
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    sentence = str(caught.value)
    assert sentence.startswith("a.png: ") and says in sentence
    assert "\n" not in sentence and len(sentence) < 200 and ". " not in sentence
    assert peak_bytes < 1 << 20


def said(*parts, role="user"):
    return [{"role": role, "content": [*parts]}]


def seen(data):
    return image_part(url(data))


TEXT = {"type": "text", "text": "a"}
CODED = base64.b64encode(BLACK).decode()


# (an image as a client gives it, a part of the sentence).
@cases(
    "given, says",
    ("https://example.org/a.png", "is an address (https:), and nothing is fetched"),
    ("http://169.254.169.254/", "is an address (http:)"),
    ("file:///etc/passwd", "is an address (file:)"),
    ("ftp://example.org/a.png", "is an address (ftp:)"),
    ("blob:null/1", "is an address (blob:)"),
    ("data:image/png,abc", "the data: URL is not base64"),
    ("data:image/png;base64", "the data: URL is not base64"),
    (f"data:{'a' * 5000};base64,{CODED}", "the data: URL is not base64"),
    ("data:image/png;base64,", "the image is empty"),
    (f"data:image/png;base64,{CODED[:40]}\n{CODED[40:]}", "the text has spaces or line breaks"),
    (f"data:image/png;base64, {CODED}", "the text has spaces or line breaks"),
    (f"data:image/png;base64,{CODED[:-1]}", "the text is cut off"),
    (f"data:image/png;base64,{CODED[:-4]}", "incomplete"),
    (f"data:image/png;base64,=={CODED[2:]}", "the text has invalid characters"),
    (f"data:image/png;base64,{CODED[:8]}-_{CODED[10:]}", "the text has invalid characters"),
    (f"data:image/png;base64,{CODED[:8]}%2B{CODED[11:]}", "the text has invalid characters"),
    (f"data:image/png;base64,{CODED[:8]}é{CODED[9:]}", "the text has invalid characters"),
    (f"data:image/png;base64,{'A' * (4 * LIMITS.file_bytes // 3 + 8)}", "the limit is 12 MiB"),
    ("/etc/passwd", "is not valid base64"),
    (None, "has no image"),
    (7, "has no image"),
)
def test_an_image_is_strict_base64_and_no_address(given, says):
    messages = said(TEXT, image_part(given))
    with pytest.raises(ConfigError, match="messages") as caught:
        settle_images(messages, LIMITS, "messages")
    assert says in str(caught.value) and "messages[0].content[1]" in str(caught.value)


@cases("head", "data:image/png;base64,", "data:image/jpeg;base64,", "DATA:;BASE64,", "")
def test_the_type_is_that_of_the_file(head):
    (part,) = parts = [{**image_part(head + CODED), "detail": "high"}]
    (text,) = settle_images(said(*parts), LIMITS, "messages")
    assert part == seen(BLACK) and part["image_url"]["url"] is text


def test_every_format_of_a_client_is_read():
    source = {"type": "base64", "media_type": "image/jpeg", "data": CODED}
    block = {"type": "image", "source": source, "cache_control": {"type": "ephemeral"}}
    right = {"type": "image", "source": {**source, "media_type": "image/png"}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [TEXT, {**block}]}
    messages = said({**block}, result)
    assert has_images(messages) and len(settle_images(messages, LIMITS, "messages")) == 2
    assert messages[0]["content"][0] == right == result["content"][1]
    given = {"type": "input_image", "image_url": CODED, "detail": "auto"}
    output = {"type": "function_call_output", "output": [{**given}]}
    items = [*said({**given}), output]
    settle_images(items, LIMITS, "input")
    right = {"type": "input_image", "image_url": url(BLACK)}
    assert items[0]["content"] == items[1]["output"] == [right]
    short = said({"type": "image_url", "image_url": CODED}, role="tool")
    settle_images(short, LIMITS, "messages")
    assert short[0]["content"] == [seen(BLACK)]


# (messages, a part of the sentence).
@cases(
    "messages, says",
    (said(seen(BLACK), role="system"), "messages[0].content[0]: this message may not"),
    (said(seen(BLACK), role="assistant"), "send images in messages of the user"),
    (said(*[seen(BLACK)] * 4), "has 4 images, and the limit is 3"),
    (said({"type": "input_audio", "input_audio": {"data": ""}}), "audio and video"),
    (said({"type": "video_url", "video_url": {"url": "a"}}), "audio and video"),
    (said({"type": "image", "source": {"type": "url", "url": "a"}}), "is an address (url)"),
    (said({"type": "image", "source": {"type": "file", "file_id": "a"}}), "is an address (file)"),
    (said({"type": "image"}), "is an address (None)"),
    (said({"type": "image", "source": {"type": "base64"}}), "has no image"),
    (said({"type": "input_image", "file_id": "a"}), "is an address (file)"),
    (said(*[seen(black(700, 700))] * 3), "messages: 3 images: decoding would take"),
)
def test_other_images_of_messages_are_refused(messages, says):
    with pytest.raises(ConfigError) as caught:
        settle_images(messages, SMALL, "messages")
    assert says in str(caught.value)


def test_all_files_of_a_request_share_the_limit_of_bytes():
    padded = black(4, 3, 8, RGB, chunk(b"tEXt", bytes(SMALL.file_bytes // 2)))
    with pytest.raises(ConfigError, match=r"1\.01 MiB in all, and the limit is 1 MiB: make"):
        settle_images(said(seen(padded), seen(padded)), SMALL, "messages")


def test_a_model_without_an_encoder_names_the_option():
    assert settle_images(said(TEXT), None, "messages") == []
    with pytest.raises(ConfigError, match="reads text only: to send images"):
        settle_images(said(seen(b"whatever")), None, "messages")


def test_a_file_is_read(tmp_path):
    path = tmp_path / "a b.png"
    path.write_bytes(BLACK)
    image, text = read_image(path, LIMITS)
    assert image.size == "4x3" and text == url(BLACK)
    path.write_bytes(bytes(SMALL.file_bytes + 1))
    with pytest.raises(ConfigError, match=r"the image has 1\.01 MiB, and the limit is 1 MiB"):
        read_image(path, SMALL)
    with pytest.raises(ConfigError, match="--mmproj"):
        read_image(path, None)


def test_files_of_pillow_are_accepted():
    PIL = pytest.importorskip("PIL.Image", reason="Pillow is missing")
    from io import BytesIO

    for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"):
        buffer = BytesIO()
        PIL.new(mode, (61, 37)).save(buffer, "PNG")
        assert inspect(buffer.getvalue(), LIMITS, mode).size == "61x37"
    noise = PIL.effect_noise((61, 37), 90)
    for mode in ("L", "RGB", "CMYK"):
        for more in ({}, {"progressive": True}, {"subsampling": 0}, {"restart_marker_blocks": 1}):
            buffer = BytesIO()
            noise.convert(mode).save(buffer, "JPEG", **more)
            assert inspect(buffer.getvalue(), LIMITS, mode).size == "61x37"


def test_the_number_of_channels_is_that_of_the_format():
    assert CHANNELS == {GREY: 1, RGB: 3, PALETTE: 1, GREY_ALPHA: 2, RGBA: 4}
