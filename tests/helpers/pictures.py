"""Small PNG and JPEG files, whole and in pieces that a test can damage."""

import base64
import struct
import zlib

PNG_START = b"\x89PNG\r\n\x1a\n"
CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
GREY, RGB, PALETTE, GREY_ALPHA, RGBA = CHANNELS


def chunk(kind, data=b"", crc=None):
    """A chunk of a PNG file. crc: a checksum to write instead of the right one."""
    right = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", crc or right)


def header(width, height, depth=8, color=RGB, method=0, filtering=0, interlace=0):
    """The data of a PNG's chunk IHDR."""
    return struct.pack(">IIBBBBB", width, height, depth, color, method, filtering, interlace)


def rows(width, height, depth=8, color=RGB):
    """The compressed black pixels of a PNG that is not interlaced."""
    row = bytes((width * depth * CHANNELS[color] + 7) // 8 + 1)
    packer = zlib.compressobj(1)
    return b"".join([*(packer.compress(row) for _ in range(height)), packer.flush()])


def png(*chunks, end=True):
    """A PNG file of these chunks."""
    return PNG_START + b"".join(chunks) + (chunk(b"IEND") if end else b"")


def black(width=4, height=3, depth=8, color=RGB, *more):
    """A black PNG image. more: chunks before its pixels."""
    pixels = chunk(b"IDAT", rows(width, height, depth, color))
    return png(chunk(b"IHDR", header(width, height, depth, color)), *more, pixels)


def segment(marker, data=b"", length=None):
    """A segment of a JPEG file. length: a length to write instead of the right one."""
    size = len(data) + 2 if length is None else length
    return struct.pack(">BBH", 0xFF, marker, size) + data


def frame(width, height, sampling=(0x11,), bits=8, n_components=None):
    """The data of a JPEG's frame header. sampling: of each component."""
    n = len(sampling) if n_components is None else n_components
    components = b"".join(bytes((at + 1, each, 0)) for at, each in enumerate(sampling))
    return struct.pack(">BHHB", bits, height, width, n) + components


SOI, EOI = b"\xff\xd8", b"\xff\xd9"
QUANTIZERS = segment(0xDB, b"\0" + b"\1" * 64)
# A DC and an AC table, each with the single code 0: no difference, and end of block.
CODES = b"".join(segment(0xC4, bytes((kind,)) + b"\1" + bytes(15) + b"\0") for kind in (0, 0x10))


def scan(n_components=1):
    """The header of a JPEG's scan of the first components."""
    ids = b"".join(bytes((at + 1, 0)) for at in range(n_components))
    return segment(0xDA, bytes((n_components,)) + ids + b"\0\x3f\0")


def codes(n_blocks):
    """The compressed data of this many empty blocks."""
    n_bits = 2 * n_blocks
    text = bytearray((n_bits + 7) // 8)
    if n_bits % 8:
        text[-1] = 0xFF >> n_bits % 8
    return bytes(text)


def jpeg(*segments, end=True):
    """A JPEG file of these segments."""
    return SOI + b"".join(segments) + (EOI if end else b"")


def grey(width=16, height=8, *more, marker=0xC0):
    """A grey JPEG image. more: segments before its pixels."""
    n_blocks = -(-width // 8) * -(-height // 8)
    head = segment(marker, frame(width, height))
    return jpeg(QUANTIZERS, head, CODES, *more, scan(), codes(n_blocks))


def url(data, kind="png"):
    """A data: URL."""
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
