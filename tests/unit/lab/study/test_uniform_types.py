"""Uniform types for comparison: the list, how files are made, and their deletion."""

from orchestrator.config import Config
from orchestrator.lab.study import uniform
from orchestrator.lab.study.uniform import UniformTypes, tiers_of


def test_types_below_the_best_tier_are_made_one_at_a_time(model, tmp_path, monkeypatch):
    monkeypatch.setattr(uniform, "spill_folder", lambda: tmp_path)
    asked = UniformTypes(Config.build(model=model, threads=1))
    said = (
        "For comparison, 5 million weights are quantized to each of these types: q3_k, q5_k, q6_k."
    )
    assert said in (asked.cost() or "")
    found = []
    for each in asked.files(lambda what, done: None):
        assert list(tmp_path.glob("*/*.gguf")) == [each.path]
        found.append((each.label, round(each.bits, 2)))
    assert found == [("q3_k, rtn", 3.44), ("q5_k, rtn", 5.5), ("q6_k, rtn", 6.56)]
    assert list(tmp_path.iterdir()) == []
    sizes = tiers_of(Config.build(model=model))
    assert [each.bits for each in sizes.values()] == [8.5, 4.5, 2.625]
