"""ggml for the tests that quantize; they are skipped, with the reason, without a build."""

import pytest

from gguf_tools.errors import QuantizeError
from gguf_tools.quantize import ggml as library


@pytest.fixture(scope="session")
def ggml():
    try:
        return library.load()
    except QuantizeError as error:
        pytest.skip(str(error))
