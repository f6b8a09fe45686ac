"""Known models: the shapes in the list have the published sizes."""

import re

import pytest

from gguf_tools.experts import ExpertModel
from gguf_tools.known import known_models

# Sizes of published GGUF files in GB.
PUBLISHED = {
    **{("Qwen3-30B-A3B", "Q4_K_M"): 18.6, ("Qwen3-30B-A3B", "Q8_0"): 32.5},
    **{("gpt-oss-20b", "MXFP4"): 12.1, ("gpt-oss-120b", "MXFP4"): 63.4},
    **{("DeepSeek-V3.1", "Q4_K_M"): 404.0, ("Mixtral-8x7B", "Q8_0"): 49.6},
}


def test_the_list_goes_from_small_models_to_the_largest():
    names = [each.name for each in known_models()]
    assert len(names) == len(set(names)) >= 25
    assert known_models()[0].total_b < 8 and known_models()[-1].total_b > 1000


@pytest.mark.parametrize("known", known_models(), ids=lambda known: known.name)
def test_the_shape_has_as_many_parameters_as_were_published(known):
    assert known.parameters / 1e9 == pytest.approx(known.total_b, rel=0.03)
    # Names are rounded, and publishers may or may not count the vocabulary's matrices.
    least, most = (each / 1e9 for each in known.active)
    assert 0.9 * least <= known.active_b <= 1.1 * most
    assert re.fullmatch(r"[^/]+/[^/]+", known.source)
    assert re.match(r"20\d\d-\d\d-\d\d, |not read", known.seen)


@pytest.mark.parametrize("known", known_models(), ids=lambda known: known.name)
def test_a_header_of_it_is_a_model(known):
    for precision in known.precisions:
        model = ExpertModel.of_parts(known.parts(precision))
        assert (model.n_expert, model.n_expert_used) == (known.experts, known.top_k)
        assert model.n_layers == known.layers - known.dense_layers
        recurrent = known.recurrent["layers"] if known.recurrent else 0
        assert model.hparams.n_head.count(0) == model.hparams.n_head_kv.count(0) == recurrent
        size = PUBLISHED.get((known.name, precision))
        if size is not None:
            assert model.parts[0].size / 1e9 == pytest.approx(size, rel=0.01)
