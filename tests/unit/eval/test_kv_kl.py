"""What keys and values in 8 bits cost is measured against 16 bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.config import Config
from orchestrator.lab.eval import EvalOptions, evaluate
from orchestrator.native import Library


@pytest.mark.parametrize(("kv", "least", "most"), [("f16", -1e-7, 1e-7), ("q8_0", 1e-6, 0.05)])
def test_the_distance_is_from_16_bits(
    library: Library,
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    kv: str,
    least: float,
    most: float,
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some words of a text, " * 20)
    model = tiny_model("qwen3moe", "q8_0", "q4_k")
    config = Config.build(
        model=model, ctx=128, threads=1, kv=kv, policy="lru", high_tier="q8_0", expert_ram=2**22
    )
    options = EvalOptions(text=text, tokens=40, window=32, kl=True)
    result = evaluate(config, options, lambda _what, _share: None)
    assert least <= result["text"]["kl"][0] <= most
    assert (" in q8_0" in result["mode"]) == (kv == "q8_0")
