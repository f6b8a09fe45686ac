"""Whatever happens to the bytes of a header, the answer is a GGUFError or a valid model."""

import time
from pathlib import Path

import pytest
from gguf_craft import write_packed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gguf_tools.errors import GGUFError
from gguf_tools.experts import ExpertModel
from gguf_tools.file.reader import GGUFFile

MOST_CPU_S = 10


def cases(n):
    return settings(
        max_examples=n,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    return write_packed(tmp_path_factory.mktemp("fuzz") / "packed.gguf").read_bytes()


def header_bytes(data):
    return GGUFFile(Path("whole.gguf"), data).data_offset


def open_bytes(folder, data):
    """True if the bytes are accepted, False if refused with a GGUFError; soon, either way."""
    path = folder / "fuzz.gguf"
    path.write_bytes(data)
    started_s = time.process_time()
    try:
        with ExpertModel.open(path) as model:
            model.kv_bytes(4096)
        accepted = True
    except GGUFError as error:
        assert str(error).startswith(str(path))
        accepted = False
    assert time.process_time() - started_s < MOST_CPU_S
    return accepted


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
    for at in range(header_bytes(packed)):
        data = bytearray(packed)
        data[at] ^= mask
        try:
            GGUFFile(Path("flip.gguf"), bytes(data))
        except GGUFError as error:
            assert str(error).startswith("flip.gguf: ")
            refused += 1
    assert refused > 100


@cases(200)
@given(st.data())
def test_random_damage(packed, tmp_path, data):
    end = header_bytes(packed)
    damaged = bytearray(packed)
    for at, value in data.draw(
        st.lists(st.tuples(st.integers(0, end - 1), st.integers(0, 255)), max_size=12)
    ):
        damaged[at] = value
    if data.draw(st.booleans()):
        del damaged[data.draw(st.integers(0, len(damaged))) :]
    open_bytes(tmp_path, bytes(damaged))


@cases(100)
@given(at=st.integers(4, 600), value=st.integers(0, (1 << 64) - 1))
def test_random_numbers(packed, tmp_path, at, value):
    damaged = bytearray(packed)
    damaged[at : at + 8] = value.to_bytes(8, "little")
    open_bytes(tmp_path, bytes(damaged))


@cases(100)
@given(st.binary(max_size=400))
def test_random_bytes_behind_the_magic(tmp_path, tail):
    assert not open_bytes(tmp_path, b"GGUF\3\0\0\0" + tail)


def test_the_undamaged_file_is_accepted(packed, tmp_path):
    assert open_bytes(tmp_path, packed)
