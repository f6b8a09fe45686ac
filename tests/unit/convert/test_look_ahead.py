"""Predicted choices of the next routers (DyMoE eq. 6) for converted families, compared with numpy:
gating functions, biases and groups of real models."""

import numpy as np
import pytest
import routers
from routers import Gating

TOKENS = [int(t) for t in np.random.default_rng(6).integers(5, 380, 96)]
IN_GROUPS = Gating(sigmoid=True, n_groups=4, n_groups_used=2)
GATINGS = {
    "deepseek-v3": IN_GROUPS,
    "glm4-moe": Gating(sigmoid=True),
    "minimax-m2": Gating(sigmoid=True),
    "gpt-oss": Gating(),
    "qwen3-moe": Gating(),
}


@pytest.mark.parametrize("name", GATINGS)
def test_predictions_equal_the_next_routers_choices(name, case):
    routers.check(case(name).packed, TOKENS, GATINGS[name])
