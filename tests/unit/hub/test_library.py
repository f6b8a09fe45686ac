"""The Python library downloads a model of the Hub by its name."""

import pytest
from hub_server import Repo

from gguf_tools import synthetic
from orchestrator import LLM, HubError


def test_a_model_of_the_hub(server, tmp_path, library, capsys):
    model = synthetic.write(tmp_path / "m.gguf", "tiny-qwen3moe")
    server.repos["o/n"] = Repo({"m.gguf": model.read_bytes()})
    settings = {"ctx": 256, "threads": 1, "ram": "400MiB"}
    with LLM("hf:o/n", **settings, progress=False) as llm:
        found = llm.generate([5, 6, 7], max_tokens=3, temp=0.0).text
        assert llm.notes[0].startswith("o/n at c0ffeec0: 1 file")
    with LLM(model, **settings) as llm:
        assert llm.generate([5, 6, 7], max_tokens=3, temp=0.0).text == found
    server.status = 503  # the cache is enough
    with LLM("hf:o/n/m.gguf", **settings) as llm:
        assert not llm.notes or "to download" not in llm.notes[0]
    with pytest.raises(HubError, match="status 503"):
        LLM("hf:o/none", **settings)
    assert capsys.readouterr() == ("", "")
