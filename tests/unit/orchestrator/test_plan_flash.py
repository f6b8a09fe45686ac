"""What attention takes of a GPU's memory, by whether it is flash attention."""

from __future__ import annotations

from pathlib import Path

import pytest

from gguf_tools import synthetic
from gguf_tools.experts import ExpertModel
from orchestrator.config import Config
from orchestrator.memory.machine import Device, Machine
from orchestrator.memory.plan import MemoryPlan, plan_memory

CTX, BATCH = 2048, 512  # all that the model was made for


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ExpertModel:
    path = tmp_path_factory.mktemp("models") / "model.gguf"
    return ExpertModel.open(synthetic.write(path, "tiny-qwen3moe", tiers=("q4_k",)))


def planned(model: ExpertModel, flash: bool, **settings: object) -> MemoryPlan:
    machine = Machine(8 << 30, Device("cuda0", "a card", 8 << 30, 8 << 30, flash))
    config = Config.build(
        model=Path(model.path), ctx=CTX, ubatch=BATCH, policy="lru", vram=4 << 30, **settings
    )
    return plan_memory(config, model, machine)


def test_what_flash_attention_does_not_keep_is_free(model: ExpertModel) -> None:
    """Weights in single precision and in half, and a mask: 0.4 GB of Qwen3-30B at 4k tokens."""
    slow, fast = planned(model, False), planned(model, True)
    assert slow.n_ctx == CTX
    weights = max(model.hparams.n_head) * BATCH * CTX
    saved = slow.scratch_bytes - fast.scratch_bytes
    assert 6 * weights < saved < 7 * weights + 5 * BATCH * CTX
    assert slow.llama_bytes - fast.llama_bytes >= 4 * weights
    # exact importance wants the weights
    exact = [planned(model, flash, importance="exact") for flash in (False, True)]
    assert exact[0].scratch_bytes == exact[1].scratch_bytes


def test_a_cache_in_8_bits_is_unpacked_a_layer_at_a_time(model: ExpertModel) -> None:
    hparams = model.hparams
    of_layer = 2 * CTX * max(hparams.n_head_kv) * (hparams.key_length + hparams.value_length)
    more = (
        planned(model, True, kv="q8_0").scratch_bytes - planned(model, True, kv="f16").scratch_bytes
    )
    assert of_layer < more < 1.4 * of_layer
