"""Reads the headers of PNG and JPEG files, and refuses files that stb_image should not decode.

llama.cpp decodes images with stb_image, which trusts a file's own sizes. So the type, the size and
the structure of a file are checked first. No pixel is decoded.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

from gguf_tools.units import format_size
from orchestrator.errors import ConfigError

PNG, JPEG = "png", "jpeg"
# llama.cpp holds the pixels of an image as RGB.
_RGB_BYTES = 3
# The encoder reads three float32 numbers for each pixel. llama.cpp holds all images of a request
# twice in this form, and once more the image that is being encoded.
_PREPARED_BYTES = 12
_COPIES = 2
_PATCH = 64
# Memory for images in this form, even if the model's images are small.
_LEAST_HELD_BYTES = 64 << 20
# A real file has a few thousand sections at most.
_MOST_SECTIONS = 1 << 16
# stb_image visits all pixels once for each scan. An ordinary progressive JPEG has ten.
_MOST_SCANS = 100
# Tables of stb_image, such as those of codes.
_TABLE_BYTES = 1 << 16
# Compressed pixels are checked in pieces of this many bytes.
_PIECE_BYTES = 1 << 16

_PNG_START, _JPEG_START = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"
# Types that are recognised to be named in a message: {beginning of the file: name}.
_OTHER_TYPES = {
    b"GIF8": "a GIF image",
    b"BM": "a BMP image",
    b"II*\0": "a TIFF image",
    b"MM\0*": "a TIFF image",
    b"\xff\x0a": "a JPEG XL image",
    b"\0\0\0\x0cJXL ": "a JPEG XL image",
    b"\0\0\0\x0cjP  ": "a JPEG 2000 image",
    b"\xff\x4f\xff\x51": "a JPEG 2000 image",
    b"8BPS": "a Photoshop image",
    b"\0\0\1\0": "an icon (ICO)",
    b"qoif": "a QOI image",
    b"#?RADIANCE": "an HDR image",
    b"<svg": "an SVG image",
    b"%PDF": "a PDF file",
    b"<!doctype html": "a web page",
    b"<html": "a web page",
    b"\x1a\x45\xdf\xa3": "a video",
    b"ID3": "a sound file",
    b"OggS": "a sound file",
    b"fLaC": "a sound file",
    b"PK\3\4": "a ZIP archive",
    b"\x1f\x8b": "a gzip archive",
}
_RIFF_TYPES = {b"WEBP": "a WebP image", b"WAVE": "a sound file", b"AVI ": "a video"}
_BRANDS = {
    **dict.fromkeys((b"heic", b"heix", b"hevc", b"hevx", b"mif1", b"msf1"), "a HEIC image"),
    **dict.fromkeys((b"avif", b"avis"), "an AVIF image"),
}
# Bit depths of PNG for each colour type, and its number of channels.
_DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
_GREY, _RGB, _PALETTE = 0, 2, 3
# Passes of an ordinary PNG, and of an interlaced one: offsets and steps (x, y) of the pixels.
_ONE_PASS = ((0, 0, 1, 1),)
_ADAM7 = (
    *((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4)),
    *((0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)),
)
# Markers of JPEG.
_SOI, _EOI, _SOS, _DNL, _DRI = 0xD8, 0xD9, 0xDA, 0xDC, 0xDD
_CODES, _QUANTIZERS = 0xC4, 0xDB
_TABLES = (_CODES, _QUANTIZERS, _DRI, _DNL, 0xFE, *range(0xE0, 0xF0))
_RESTARTS = range(0xD0, 0xD8)
_BASELINE, _EXTENDED, _PROGRESSIVE = 0xC0, 0xC1, 0xC2
_REFUSED_FRAMES = {
    **dict.fromkeys((0xC3, 0xCB), "a lossless"),
    **dict.fromkeys((0xC5, 0xC6, 0xC7, 0xDE), "a hierarchical"),
    **dict.fromkeys((0xC9, 0xCA, 0xCC, 0xCD, 0xCE, 0xCF), "an arithmetic-coded"),
}
# The end of compressed data: a marker other than a restart. FF 00 is a byte of data.
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
_CONVERT = "convert it to PNG or JPEG"
_SMALLER = "make the image smaller"
_AGAIN = "save the image again as PNG or JPEG"


@dataclass(frozen=True)
class ImageLimits:
    """Limits for the images of one request.

    A prepared image is an image that llama.cpp has scaled or cut into tiles for the model.

    - file_bytes: the bytes of all image files together.
    - pixels: width times height of one image.
    - count: the number of images.
    - shape: the longer side of an image divided by the shorter side.
    - decode_bytes: the memory for decoding the image files (see the function decode_bytes).
    - prepared_bytes: the memory of the largest prepared image.
    - min_pixels: smaller images are enlarged to this many pixels; 0 if tiles have a fixed size.
    - held_bytes: the memory for all prepared images.
    """

    # The files are part of the request and of each later request of the conversation.
    file_bytes: int = 12 << 20
    pixels: int = 1 << 25  # an 8K screen has 33.2 million
    count: int = 32
    shape: int = 64  # models enlarge narrow images
    # stb_image takes 4.5 to 8 bytes for each pixel of an ordinary image, and up to 28 for an
    # interlaced PNG with 16 bits, so the memory has a limit of its own. It is enough for three
    # photos of 12 million pixels, or for one PNG of 16 million pixels with alpha.
    decode_bytes: int = 129 << 20
    prepared_bytes: int = 0
    min_pixels: int = 0
    held_bytes: int = 0

    def as_dict(self) -> dict[str, int]:
        """Return limits that a program can check before it sends the images of a request.

        - bytes: the bytes of all image files together.
        - pixels: width times height of one image.
        - count: the number of images.
        """
        return {"bytes": self.file_bytes, "pixels": self.pixels, "count": self.count}

    def with_prepared_sizes(self, prepared_bytes: int, min_pixels: int) -> ImageLimits:
        """Return a copy of these limits that also limits the memory of prepared images.

        A prepared image is an image that llama.cpp has scaled, or cut into tiles, for the model.
        The copy has the two arguments as fields, and the method `prepared` estimates the memory of
        an image from them. The limit for all prepared images together, held_bytes, is five times
        prepared_bytes, or _LEAST_HELD_BYTES if that is more.

        - prepared_bytes: the memory of the largest image that llama.cpp prepared in a measurement.
        - min_pixels: llama.cpp enlarges smaller images to this number of pixels. It is 0 if
          llama.cpp cuts images into tiles of a fixed size.
        """
        held = _COPIES * 2 * prepared_bytes + prepared_bytes
        return replace(
            self,
            prepared_bytes=prepared_bytes,
            min_pixels=min_pixels,
            held_bytes=max(held, _LEAST_HELD_BYTES),
        )

    @property
    def request_bytes(self) -> int:
        """Maximum bytes of memory for decoding and scaling the images of one request.

        The body of the request, which contains the image files, is not included.
        """
        return self.decode_bytes + self.held_bytes

    def prepared(self, image: Image) -> int:
        """Return the maximum memory of an image after it was scaled for the model, in bytes."""
        if not self.min_pixels:
            return self.prepared_bytes
        # The sides are rounded to whole patches, which have fewer than _PATCH pixels each way.
        n_pixels = max(2 * self.min_pixels, (image.width + _PATCH) * (image.height + _PATCH))
        return min(self.prepared_bytes, _PREPARED_BYTES * n_pixels)

    def check_bytes(self, n_bytes: int, name: str) -> None:
        """Raise ConfigError if an image file of n_bytes is larger than the limit file_bytes.

        name: the beginning of the message.
        """
        if n_bytes > self.file_bytes:
            raise ConfigError(
                f"{name}: the image has {format_size(n_bytes, up=True)}, and the limit is "
                f"{format_size(self.file_bytes)}: {_SMALLER}"
            )

    def check_size(self, width: int, height: int, name: str) -> None:
        """Raise ConfigError if an image has too many pixels. name: the beginning of the message."""
        if width * height > self.pixels:
            side = int(self.pixels**0.5)
            raise ConfigError(
                f"{name}: the image has {width}x{height} pixels, and the limit is {self.pixels:,} "
                f"pixels (such as {side}x{side}): {_SMALLER}"
            )
        if max(width, height) > self.shape * min(width, height):
            raise ConfigError(
                f"{name}: the image has {width}x{height} pixels, and one side may be at most "
                f"{self.shape} times as long as the other: cut the image into parts"
            )

    def check_memory(self, n_bytes: int, name: str) -> None:
        """Raise ConfigError if decoding images takes more memory than the limit decode_bytes.

        n_bytes: memory that decoding takes. name: beginning of the message.
        """
        if n_bytes > self.decode_bytes:
            raise ConfigError(
                f"{name}: decoding would take {format_size(n_bytes)} of memory, and the limit is "
                f"{format_size(self.decode_bytes)}: reduce the number of pixels"
            )

    def check_images(self, images: Sequence[Image], name: str) -> None:
        """Raise ConfigError if the images of a request take too much memory.

        name: the beginning of the message.
        """
        self.check_memory(decode_bytes(images), name)
        prepared = [self.prepared(each) for each in images]
        n_bytes = _COPIES * sum(prepared) + max(prepared, default=0)
        if n_bytes > self.held_bytes > 0:
            raise ConfigError(
                f"{name}: scaled for the model, the images take {format_size(n_bytes)} of memory, "
                f"and the limit is {format_size(self.held_bytes)}: leave some images out, or lower "
                "--image-max-tokens"
            )


@dataclass(frozen=True)
class Image:
    """The properties of an image file.

    type: PNG or JPEG. n_bytes: length of the file. stb_bytes: memory that stb_image takes to decode
    the file, without the file itself.
    """

    type: str
    width: int
    height: int
    n_bytes: int
    stb_bytes: int

    @property
    def rgb_bytes(self) -> int:
        """Memory of the decoded pixels."""
        return _RGB_BYTES * self.width * self.height

    @property
    def size(self) -> str:
        """Width and height as text, such as "640x480"."""
        return f"{self.width}x{self.height}"


def decode_bytes(images: Iterable[Image]) -> int:
    """Return the memory that llama.cpp takes to decode the images of a request, in bytes.

    llama.cpp decodes one image after the other, copies the pixels of each, and holds all copies
    until the prompt is divided into tokens.
    """
    held_bytes = peak_bytes = 0
    for each in images:
        peak_bytes = max(peak_bytes, held_bytes + max(each.stb_bytes, 2 * each.rgb_bytes))
        held_bytes += each.rgb_bytes
    return peak_bytes


def inspect(data: bytes, limits: ImageLimits, name: str) -> Image:
    """Return the properties of an image file that stb_image can decode within the limits.

    name: the beginning of messages, such as the name of the file. Raises ConfigError with one
    sentence for any other file, for a damaged or incomplete file, and for a file above the limits.
    """
    limits.check_bytes(len(data), name)
    if data.startswith(_PNG_START):
        return _png(data, limits, name)
    if data.startswith(_JPEG_START):
        return _jpeg(data, limits, name)
    if not data:
        raise ConfigError(f"{name}: the image is empty: choose another file")
    for start in (_PNG_START, _JPEG_START):
        if start.startswith(data[:12]):
            _cut(name, "image", "the file ends after its first bytes")
    found = type_of(data)
    if found is None:
        raise ConfigError(f"{name}: this is neither PNG nor JPEG: {_CONVERT}")
    raise ConfigError(f"{name}: this is {found}: {_CONVERT}")


def type_of(data: bytes) -> str | None:
    """Return the name of a file's type with its article, such as "a GIF image".

    `data` is the beginning of the file. Returns None for an unknown type.
    """
    if data.startswith(_PNG_START):
        return "a PNG image"
    if data.startswith(_JPEG_START):
        return "a JPEG image"
    if data.startswith(b"RIFF"):
        return _RIFF_TYPES.get(data[8:12])
    if data[4:8] == b"ftyp":
        return _BRANDS.get(data[8:12], "a video")
    text = data[:1024].lstrip(b"\xef\xbb\xbf \t\r\n")
    if text.startswith((b"<?xml", b"<!--")) and b"<svg" in text:
        return "an SVG image"
    beginnings = (data, text)
    return next(
        (
            name
            for start, name in _OTHER_TYPES.items()
            if any(each[: len(start)].lower() == start.lower() for each in beginnings)
        ),
        None,
    )


def _damaged(name: str, what: str, why: str) -> NoReturn:
    raise ConfigError(f"{name}: the {what} is damaged ({why}): {_AGAIN}")


def _cut(name: str, what: str, why: str) -> NoReturn:
    raise ConfigError(f"{name}: the {what} is incomplete ({why}): send the whole file")


class _Chunk(NamedTuple):
    """A chunk of a PNG file: its type, and the offsets of the start and end of its data."""

    type: bytes
    start: int
    end: int

    @property
    def is_critical(self) -> bool:
        """Whether a program that does not know this type of PNG chunk must refuse the file."""
        return not self.type[0] & 0x20


def _chunks(data: bytes, name: str) -> Iterator[_Chunk]:
    """Yield the chunks of a PNG file up to IEND. stb_image does not read the rest either.

    The checksums of chunks that change the pixels are compared.
    """
    view, at, n_chunks, kind = memoryview(data), len(_PNG_START), 0, b""
    while kind != b"IEND":
        if at + 12 > len(data):
            _cut(name, "PNG file", "the PNG chunk IEND is missing")
        length, kind = struct.unpack_from(">I4s", data, at)
        start, n_chunks = at + 8, n_chunks + 1
        if not kind.isalpha() or n_chunks > _MOST_SECTIONS:
            too_many = n_chunks > _MOST_SECTIONS
            many = f"the file has more than {_MOST_SECTIONS} PNG chunks"
            why = many if too_many else "a PNG chunk has an invalid type"
            _damaged(name, "PNG file", why)
        at = start + length + 4
        if at > len(data):
            _cut(name, "PNG file", f"the file ends within the chunk {kind.decode()}")
        chunk = _Chunk(kind, start, start + length)
        if chunk.is_critical or kind == b"tRNS":
            (crc,) = struct.unpack_from(">I", data, chunk.end)
            if zlib.crc32(view[start - 4 : chunk.end]) != crc:
                _damaged(name, "PNG file", f"a PNG chunk {kind.decode()} has a wrong checksum")
        yield chunk


def _png(data: bytes, limits: ImageLimits, name: str) -> Image:
    what, chunks = "PNG file", _chunks(data, name)
    first = next(chunks)
    if first.type != b"IHDR" or first.end - first.start != 13:
        _damaged(name, what, "its first PNG chunk is not a valid IHDR header")
    width, height, depth, color, method, filtering, interlace = struct.unpack_from(
        ">IIBBBBB", data, first.start
    )
    if not width or not height:
        _damaged(name, what, f"it has {width}x{height} pixels")
    limits.check_size(width, height, name)
    if depth not in _DEPTHS.get(color, ()) or method or filtering or interlace > 1:
        _damaged(name, what, "its header has unknown values")
    has_key, n_colors, pixels = False, 0, list[_Chunk]()
    for chunk in chunks:
        length = chunk.end - chunk.start
        if chunk.type == b"PLTE":
            n_colors = length // 3
            if pixels or length % 3 or not 1 <= n_colors <= 256:
                _damaged(name, what, "its palette is wrong")
        elif chunk.type == b"tRNS":
            has_key = True
            right = {_GREY: length == 2, _RGB: length == 6, _PALETTE: 0 < length <= n_colors}
            if pixels or not right.get(color, False):
                _damaged(name, what, "its transparency is wrong")
        elif chunk.type == b"IDAT":
            pixels.append(chunk)
        elif chunk.is_critical and chunk.type != b"IEND":
            _damaged(name, what, f"the file has the unknown PNG chunk {chunk.type.decode()}")
    if color == _PALETTE and not n_colors:
        _damaged(name, what, "it has no palette")
    if not pixels:
        _cut(name, what, "the file has no pixels")
    n_raw = _raw_bytes(width, height, depth * _CHANNELS[color], interlace)
    n_compressed = sum(chunk.end - chunk.start for chunk in pixels)
    rows_bytes = 2 * n_raw if interlace else n_raw
    stb_bytes = max(
        2 * n_compressed + rows_bytes,
        _png_memory(width * height, depth, color, has_key, rows_bytes, bool(interlace)),
    )
    # stb_image also has two rows of its own.
    stb_bytes += 2 * ((width * depth * _CHANNELS[color] + 7) // 8) + _TABLE_BYTES
    limits.check_memory(stb_bytes, name)
    _check_pixels(data, pixels, n_raw, f"{width}x{height}", name)
    return Image(PNG, width, height, len(data), stb_bytes)


def _raw_bytes(width: int, height: int, bits: int, interlace: int) -> int:
    """Return the length of a PNG's uncompressed pixels: rows with a filter byte each.

    bits: number of bits for each pixel.
    """
    total = 0
    for x, y, step_x, step_y in _ADAM7 if interlace else _ONE_PASS:
        columns, rows = -(-(width - x) // step_x), -(-(height - y) // step_y)
        if columns > 0 and rows > 0:
            total += ((columns * bits + 7) // 8 + 1) * rows
    return total


def _png_memory(
    n_pixels: int, depth: int, color: int, has_key: bool, rows_bytes: int, is_interlaced: bool
) -> int:
    """Return the memory that stb_image takes to convert the rows of a PNG to RGB, in bytes.

    depth: number of bits of each channel. has_key: whether the file has a tRNS chunk. rows_bytes:
    memory of the rows, which stb_image doubles if they are longer than it expects, as those of an
    interlaced image are.
    """
    each = 2 if depth == 16 else 1
    out = n_pixels * each * (_CHANNELS[color] + (has_key and color != _PALETTE))
    one_pass = out // 2 if is_interlaced else 0
    palette = _RGB_BYTES * n_pixels if color == _PALETTE else 0
    converted = _RGB_BYTES * n_pixels * each
    narrowed = _RGB_BYTES * n_pixels if each == 2 else 0
    return max(rows_bytes + out + max(one_pass, palette), out + converted, converted + narrowed)


def _check_pixels(data: bytes, chunks: list[_Chunk], n_raw: int, size: str, name: str) -> None:
    """Raise ConfigError unless the compressed pixels of a PNG have exactly n_raw bytes.

    stb_image would decompress all of them, however many there are. Here each piece is dropped at
    once.
    """
    inflater, view, n_bytes = zlib.decompressobj(), memoryview(data), 0
    try:
        for piece in _pieces(view, chunks):
            left: Any = piece
            while True:
                found = inflater.decompress(left, _PIECE_BYTES)
                n_bytes += len(found)
                if n_bytes > n_raw:
                    _damaged(name, "PNG file", f"the file has more data than {size} pixels need")
                left = inflater.unconsumed_tail
                if inflater.eof or not (left or len(found) == _PIECE_BYTES):
                    break
            if inflater.eof:
                break
    except zlib.error:
        _damaged(name, "PNG file", "its pixels cannot be decompressed")
    if n_bytes < n_raw or not inflater.eof:
        _cut(name, "PNG file", "pixels are missing")


def _pieces(view: memoryview, chunks: list[_Chunk]) -> Iterator[memoryview]:
    for chunk in chunks:
        for at in range(chunk.start, chunk.end, _PIECE_BYTES):
            yield view[at : min(at + _PIECE_BYTES, chunk.end)]


def _markers(data: bytes, name: str) -> Iterator[tuple[int, int, int]]:
    """Yield (marker, begin, end) of each segment of a JPEG file, up to the end of the image.

    Segments are separated as in stb_image, so that it finds the same ones. After a start of scan
    the compressed data is skipped.
    """
    at, n_markers, what = 2, 0, "JPEG file"
    while True:
        at = data.find(b"\xff", at)
        while 0 <= at < len(data) and data[at] == 0xFF:
            at += 1
        if not 0 <= at < len(data):
            _cut(name, what, "the JPEG end marker is missing")
        marker, at, n_markers = data[at], at + 1, n_markers + 1
        if n_markers > _MOST_SECTIONS:
            _damaged(name, what, f"the file has more than {_MOST_SECTIONS} JPEG segments")
        if marker == _EOI:
            return
        if marker in (0x00, 0x01, _SOI) or marker in _RESTARTS:
            _damaged(name, what, f"the JPEG marker {marker:02X} is misplaced")
        length = int.from_bytes(data[at : at + 2], "big") if at + 2 <= len(data) else 0
        if at + max(length, 2) > len(data):
            part = "pixels" if marker == _SOS else "header"
            _cut(name, what, f"the file ends within the {part}")
        if length < 2:
            _damaged(name, what, "a JPEG segment has an invalid length")
        yield marker, at + 2, at + length
        at += length
        if marker == _SOS:
            found = _MARKER.search(data, at)
            if found is None:
                _cut(name, what, "the JPEG end marker is missing")
            at = found.start()


def _jpeg(data: bytes, limits: ImageLimits, name: str) -> Image:
    what, frame, n_scans, missing = "JPEG file", None, 0, set[int]()
    is_progressive = False
    for marker, start, end in _markers(data, name):
        segment = data[start:end]
        if marker in _REFUSED_FRAMES:
            kind = _REFUSED_FRAMES[marker]
            raise ConfigError(f"{name}: this is {kind} JPEG, which is not supported: {_AGAIN}")
        if marker in (_BASELINE, _EXTENDED, _PROGRESSIVE):
            if frame is not None:
                _damaged(name, what, "it has two headers")
            is_progressive = marker == _PROGRESSIVE
            frame, missing = _frame(segment, is_progressive, limits, name), {*segment[6::3]}
        elif marker == _SOS:
            n_scans += 1
            if frame is None:
                _damaged(name, what, "the file has pixels before the header")
            if n_scans > _MOST_SCANS:
                _damaged(name, what, f"the file has more than {_MOST_SCANS} JPEG scans")
            missing -= _begun(segment, is_progressive, name)
        elif marker not in _TABLES:
            _damaged(name, what, f"the file has the unknown JPEG marker {marker:02X}")
        elif not _are_tables(marker, segment):
            _damaged(name, what, "the JPEG tables are wrong")
    if frame is None:
        _damaged(name, what, "it has no header")
    if missing:
        # stb_image would show what was in memory before.
        why = "pixels of a colour channel are missing" if n_scans else "the file has no pixels"
        _cut(name, what, why)
    width, height, stb_bytes = frame
    return Image(JPEG, width, height, len(data), stb_bytes)


def _begun(header: bytes, is_progressive: bool, name: str) -> set[int]:
    """Return the components whose pixels begin in the scan of a JPEG with this header (SOS)."""
    n_components = header[0] if header else 0
    if not 1 <= n_components <= 4 or len(header) != 4 + 2 * n_components:
        _damaged(name, "JPEG file", "a JPEG scan has an invalid header")
    first, _, bits = header[-3:]
    if is_progressive and (first or bits >> 4):  # it refines earlier scans
        return set()
    return {*header[1:-3:2]}


def _are_tables(marker: int, segment: bytes) -> bool:
    """Return whether stb_image accepts a segment of a JPEG that is neither a frame nor a scan.

    After a wrong segment it would return an image with the pixels before it.
    """
    if marker == _DRI:
        return len(segment) == 2
    at = 0
    while marker in (_QUANTIZERS, _CODES) and at < len(segment):
        kind, number = segment[at] >> 4, segment[at] & 15
        if kind > 1 or number > 3:
            return False
        counts = segment[at + 1 : at + 17] if marker == _CODES else b""
        n_codes = 0
        for length, count in enumerate(counts, 1):
            n_codes = 2 * n_codes + count
            if n_codes > 1 << length:
                return False
        at += 17 + sum(counts) if marker == _CODES else 65 + 64 * kind
    return marker not in (_QUANTIZERS, _CODES) or at == len(segment)


def _frame(
    header: bytes, is_progressive: bool, limits: ImageLimits, name: str
) -> tuple[int, int, int]:
    """Return (width, height, memory of stb_image) of a JPEG with this frame header (SOF)."""
    what = "JPEG file"
    if len(header) < 6:
        _damaged(name, what, "its header is too short")
    bits, height, width, n_components = struct.unpack_from(">BHHB", header)
    if bits != 8:
        raise ConfigError(f"{name}: this is a {bits}-bit JPEG, which is not supported: {_AGAIN}")
    if not width or not height:
        _damaged(name, what, f"it has {width}x{height} pixels")
    limits.check_size(width, height, name)
    if n_components not in (1, 3, 4) or len(header) != 6 + 3 * n_components:
        _damaged(name, what, f"its header has {n_components} colours")
    sampling = [(each >> 4, each & 15) for each in header[7::3]]
    most_x, most_y = (max(factors) for factors in zip(*sampling, strict=True))
    for x, y in sampling:
        if not (0 < x <= 4 and 0 < y <= 4) or most_x % x or most_y % y:
            _damaged(name, what, "the JPEG header has wrong colour sampling factors")
    if any(each > 3 for each in header[8::3]):
        _damaged(name, what, "its header has unknown values")
    blocks = -(-width // (8 * most_x)) * -(-height // (8 * most_y))
    samples = sum(64 * blocks * x * y for x, y in sampling)
    # A progressive image also has coefficients of two bytes each. Each colour has a line buffer.
    memory_bytes = samples * (3 if is_progressive else 1) + n_components * (width + 3)
    memory_bytes += _RGB_BYTES * width * height + _TABLE_BYTES
    limits.check_memory(memory_bytes, name)
    return width, height, memory_bytes
