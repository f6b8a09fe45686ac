"""What the next routers are predicted to choose (DyMoE eq. 6), against numpy."""

import pytest
import routers
from routers import Gating

from .conftest import drawn

TOKENS = drawn(96, 5)
SIGMOID_IN_GROUPS = Gating(sigmoid=True, n_groups=4, n_groups_used=2)
GATINGS = {
    "qwen3moe": Gating(),
    "mixtral": Gating(),
    "phimoe": Gating(),
    "deepseek2": SIGMOID_IN_GROUPS,
}


@pytest.mark.parametrize("shape", GATINGS)
def test_the_next_routers_are_asked(shape, tiny_model):
    routers.check(tiny_model(shape, "q4_k"), TOKENS, GATINGS[shape])


def test_groups_and_bias_count(tiny_model):
    """Else the test above would not see them."""
    model = tiny_model("deepseek2", "q4_k")
    assert routers.matters(model, TOKENS, SIGMOID_IN_GROUPS, "groups") > 20
    assert routers.matters(model, TOKENS, SIGMOID_IN_GROUPS, "choice_bias") > 0
