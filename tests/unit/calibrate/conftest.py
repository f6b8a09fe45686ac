"""Random-weight models in F16, and a text for calibration."""

import pytest

from gguf_tools import synthetic
from gguf_tools.quantize.ggml import load_ggml
from orchestrator.errors import MoeEdgeError
from orchestrator.native.llama import Bindings

TEXT = (
    "The fox sat by the river and looked at the stars. It was late, and nobody came. "
    "In the morning a boat went by with three old men, who sang. "
)


@pytest.fixture(scope="session")
def ggml():
    try:
        Bindings.load()
        return load_ggml()
    except MoeEdgeError as error:
        pytest.skip(f"no built llama.cpp: {error}")


@pytest.fixture(scope="session")
def model(ggml, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    synthetic.write(path, "tiny-qwen3moe", tiers=("f16",), routing="zipf", zipf_s=2.0, seed=1)
    return path


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "calib.txt"
    path.write_text(TEXT * 6)
    return path
