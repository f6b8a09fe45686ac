"""A local server in place of the Hub, and a separate cache."""

import pytest
from hub_server import Hub


@pytest.fixture
def server(tmp_path, monkeypatch):
    """An empty Hub with a separate cache, set as HF_ENDPOINT and HF_HOME would."""
    from huggingface_hub import constants

    state = Hub()
    state.start()
    # The library reads the environment once, at import.
    for name in ("HUGGINGFACE_CO_URL_TEMPLATE", "ENDPOINT"):
        value = getattr(constants, name).replace(constants.ENDPOINT, state.url)
        monkeypatch.setattr(constants, name, value)
    # If a connection breaks, the unfinished chunk is fetched again.
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 50_000)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf/hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "hf/token"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    yield state
    state.stop()
