"""Uniform types for comparison: the list, how files are made, and their deletion."""

import pytest

from gguf_tools.errors import MismatchError
from orchestrator.config import Config
from orchestrator.lab.eval import EvalOptions
from orchestrator.lab.study import uniform
from orchestrator.lab.study.uniform import UniformTypes, tiers_of


def types(model, **options):
    return UniformTypes(Config.build(model=model, threads=1), EvalOptions(**options))


def test_types_are_made_one_at_a_time_and_given_files_are_used(model, tmp_path, monkeypatch):
    monkeypatch.setattr(uniform, "spill_folder", lambda: tmp_path)
    calib = tmp_path / "calib.txt"
    calib.write_text("The fox sat by the river and looked at the stars. " * 40)
    asked = types(model, uniform=("iq2_xxs", "q4_k", "q3_k", str(model)), calib=calib)
    assert "5 million weights are quantized 4 times (iq2_xxs, q3_k, q4_k)" in (asked.cost() or "")
    found = []
    for each in asked.files(lambda what, done: None):
        assert each.path.exists()
        assert len(list(tmp_path.glob("*/*.gguf"))) == (each.path != model)
        found.append((each.label, round(each.bits, 2)))
    assert found == [
        ("q8_0, random", 8.5),
        ("iq2_xxs, imatrix", 2.06),
        ("q3_k, rtn", 3.44),
        ("q3_k, imatrix", 3.44),
        ("q4_k, imatrix", 4.5),
    ]
    assert list(tmp_path.iterdir()) == [calib]


def test_the_usual_types_are_those_below_the_best_tier(model):
    assert "3 times (q3_k, q5_k, q6_k)" in (types(model).cost() or "")
    assert types(model, uniform=("none",)).cost() is None
    sizes = tiers_of(Config.build(model=model))
    assert [each.bits for each in sizes.values()] == [8.5, 4.5, 2.625]


def test_a_file_of_another_model_is_no_rival(model, tiny_model):
    other = tiny_model("qwen3moe", "q8_0", "q2_k", seed=2)
    with pytest.raises(MismatchError, match="not the same model as"):
        types(model, uniform=(str(other),))
