"""Calibration of models that multiply the inputs of their experts by the gate weights."""

import pytest

from gguf_tools.experts import ExpertModel
from orchestrator.lab.calibrate.measure import OutputSums
from orchestrator.lab.calibrate.reader import TextReader

pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[convert]'")


@pytest.mark.parametrize(("family", "weighs"), [("llama4", True), ("qwen3-moe", False)])
def test_the_losses_count_each_gate_weight_once(case, family, weighs):
    """With one expert per token, the shape of the inputs does not show it."""
    found = case(family)
    with (
        ExpertModel.open(found.packed) as model,
        TextReader(found.packed, [found.tokens], 1, None) as reader,
    ):
        sums = OutputSums(model)
        for _ in reader.read(sums.route, sums.add_product):
            pass
    assert sums.squares.any() and sums.weighs.tolist() == [weighs] * model.n_layers
