"""The demo model's loss table, a file next to the model."""

from gguf_tools.experts import ExpertModel
from orchestrator.cli.options import demo_model
from orchestrator.cost.losses import default_path, load


def test_the_demos_loss_table_matches_its_file():
    """The table belongs to this file, and its KL factors are fitted for all tiers."""
    with ExpertModel.open(demo_model()) as model:
        table = load(default_path(model.path), model)
        estimate = table.estimate([tier.name for tier in model.tiers])
    assert estimate is not None and estimate.base == "q8_0"
    best, lower, lowest, skipped = estimate.nats.mean(axis=(0, 1))
    assert best == 0.0 < lower < lowest < skipped
