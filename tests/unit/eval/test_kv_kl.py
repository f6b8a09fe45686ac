"""--kl compares with the named tier, with keys and values in 16 bits."""

from dataclasses import replace
from typing import Any

import pytest

from orchestrator.config import Config
from orchestrator.errors import ConfigError, MoeEdgeError
from orchestrator.lab.eval import EvalOptions, evaluate


def asked(model, folder, kl_from=None, **settings):
    """(configuration, options) for the evaluation of a short text with --kl."""
    text = folder / "text.txt"
    text.write_text("some words of a text, " * 20)
    usual: dict[str, Any] = {"ctx": 128, "threads": 1, "policy": "lru", "expert_ram": 2**22}
    config = Config.build(model=model, **usual, **settings)
    return config, EvalOptions(text=text, tokens=40, window=32, kl=True, kl_from=kl_from)


@pytest.mark.parametrize(("kv", "least", "most"), [("f16", -1e-7, 1e-7), ("q8_0", 1e-6, 0.05)])
def test_kl_is_relative_to_16_bit_keys_and_values(library, tiny_model, tmp_path, kv, least, most):
    model = tiny_model("qwen3moe", "q8_0", "q4_k")
    config, options = asked(model, tmp_path, kv=kv, high_tier="q8_0")
    result = evaluate(config, options, lambda _what, _share: None)
    assert least <= result["text"]["kl"][0] <= most
    assert (" in q8_0" in result["mode"]) == (kv == "q8_0")


@pytest.mark.parametrize(
    ("high", "kl_from", "least", "most"),
    [("q4_k", "q4_k", -1e-7, 1e-7), ("q4_k", None, 1e-6, 0.5), ("q8_0", "Q4_K", 1e-6, 0.5)],
)
def test_kl_is_relative_to_the_named_tier(
    library, tiny_model, tmp_path, high, kl_from, least, most
):
    model = tiny_model("qwen3moe", "q8_0", "q4_k")
    config, options = asked(model, tmp_path, kl_from, high_tier=high)
    result = evaluate(config, options, lambda _what, _share: None)["text"]
    assert least <= result["kl"][0] <= most
    assert result["best_tier"] == (kl_from or "q8_0").lower()
    with pytest.raises(ConfigError, match="--kl-from has no effect without --kl"):
        evaluate(config, replace(options, kl=False, kl_from="q4_k"), lambda _what, _share: None)
    with pytest.raises(MoeEdgeError, match="there is no tier q3_k: choose one of q8_0, q4_k"):
        evaluate(config, replace(options, kl_from="q3_k"), lambda _what, _share: None)
