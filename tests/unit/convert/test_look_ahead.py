"""What the next routers of converted families are predicted to choose (DyMoE eq. 6), against numpy:
the gating functions, biases and groups that real models have."""

import numpy as np
import pytest
import routers
from routers import Gating

TOKENS = [int(t) for t in np.random.default_rng(6).integers(5, 380, 96)]
IN_GROUPS = Gating(sigmoid=True, n_groups=4, n_groups_used=2)
# What of the gating has to count in the test for it to see that.
GATINGS = {
    "deepseek-v3": (IN_GROUPS, ("groups", "choice_bias")),
    "glm4-moe": (Gating(sigmoid=True), ("choice_bias",)),
    "minimax-m2": (Gating(sigmoid=True), ("choice_bias",)),
    "gpt-oss": (Gating(), ("bias",)),
    "qwen3-moe": (Gating(), ()),
}


@pytest.mark.parametrize("name", GATINGS)
def test_the_next_routers_are_asked(name, case):
    gating, parts = GATINGS[name]
    packed = case(name).packed
    routers.check(packed, TOKENS, gating)
    for part in parts:
        assert routers.matters(packed, TOKENS, gating, part) > 0, part
