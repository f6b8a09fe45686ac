"""The server of the tests, in the place of the Hub, and a cache of its own."""

import pytest
from hub_server import Hub


@pytest.fixture
def server(tmp_path, monkeypatch):
    """The Hub of this test, empty, and a cache of its own, as HF_ENDPOINT and HF_HOME set them."""
    from huggingface_hub import constants

    state = Hub()
    state.start()
    # read from the environment when the library is imported, which is once a process
    for name in ("HUGGINGFACE_CO_URL_TEMPLATE", "ENDPOINT"):
        value = getattr(constants, name).replace(constants.ENDPOINT, state.url)
        monkeypatch.setattr(constants, name, value)
    # what is lost of a chunk when a connection breaks is fetched again
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 50_000)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf/hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "hf/token"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    yield state
    state.stop()
