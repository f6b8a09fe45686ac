"""Predictions of the next layers' routers (DyMoE eq. 6), compared with numpy."""

import pytest
import routers
from routers import Gating

from .conftest import drawn

GATINGS = {
    "qwen3moe": Gating(),
    "deepseek2": Gating(sigmoid=True, n_groups=4, n_groups_used=2),
}


@pytest.mark.parametrize("shape", GATINGS)
def test_predictions_equal_numpy(shape, tiny_model):
    routers.check(tiny_model(shape, "q4_k"), drawn(96, 5), GATINGS[shape])
