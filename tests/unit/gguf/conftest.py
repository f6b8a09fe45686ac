"""Fixtures: the ggml library, without which tests skip, and good files for verification."""

import pytest
from verify_files import write_bytes

from gguf_tools import synthetic
from gguf_tools.errors import QuantizeError
from gguf_tools.pack import export
from gguf_tools.quantize import ggml as library


@pytest.fixture(scope="session")
def ggml():
    try:
        return library.load_ggml()
    except QuantizeError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    path = tmp_path_factory.mktemp("verify") / "packed.gguf"
    return synthetic.write(path, "tiny-qwen3moe", tiers=("q4_k", "q2_k"))


@pytest.fixture
def copy(packed, tmp_path):
    return write_bytes(tmp_path / "copy.gguf", packed.read_bytes())


@pytest.fixture
def two_files(packed, tmp_path):
    return [export(packed, tmp_path / f"{tier}.gguf", tier).path for tier in ("q4_k", "q2_k")]
