"""ggml for the tests that quantize; they are skipped, with the reason, without a build."""

import pytest

from gguf_tools import quantize
from gguf_tools.errors import QuantizeError


@pytest.fixture(scope="session")
def ggml():
    try:
        return quantize.load()
    except QuantizeError as error:
        pytest.skip(str(error))
