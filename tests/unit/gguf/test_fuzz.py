"""Every cut of a file is refused, and so is, or is a sound header, every flip of a header's bytes:
random damage is in tests/fuzz."""

from pathlib import Path

import pytest
from gguf_craft import write_packed

from gguf_tools.errors import GGUFError
from gguf_tools.file.reader import GGUFFile


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    return write_packed(tmp_path_factory.mktemp("fuzz") / "packed.gguf").read_bytes()


def test_every_truncation_is_refused(packed):
    end = GGUFFile(Path("whole.gguf"), packed)
    last = max(info.offset + info.nbytes for info in end.tensors.values())
    stops = [*range(1, end.data_offset), end.data_offset, last - 4097, last - 1]
    for stop in stops:
        with pytest.raises(GGUFError, match=r"^cut\.gguf: "):
            GGUFFile(Path("cut.gguf"), packed[:stop])
    assert len(GGUFFile(Path("cut.gguf"), packed[:last]).tensors) == len(end.tensors)


@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_every_flipped_header_byte(packed, mask):
    refused = 0
    for at in range(GGUFFile(Path("whole.gguf"), packed).data_offset):
        data = bytearray(packed)
        data[at] ^= mask
        try:
            GGUFFile(Path("flip.gguf"), bytes(data))
        except GGUFError as error:
            assert str(error).startswith("flip.gguf: ")
            refused += 1
    assert refused > 100
