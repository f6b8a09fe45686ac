"""Cold experts stay in the host memory of a GPU, where the host's threads compute them."""

import pytest

from .conftest import Runs
from .test_engine import assert_same_answer


@pytest.mark.parametrize(("n_hot", "n_prompt"), [(1, 12), (3, 12), (1, 80)])
def test_cold_experts_are_not_copied_to_the_gpu(device, three, n_hot, n_prompt):
    """After the start, only experts that the placement made hot are copied to the GPU, each once.

    The host computes all others, also in prompts, where rows of one expert form a matrix product.
    """
    options = {"policy": "context", "hot_experts": n_hot, "near_place": "host"}
    options |= {"placement": "wait", "ubatch": max(16, n_prompt)}
    options["prompt"] = list(range(5, 5 + n_prompt))
    runs = Runs(device, three)
    wanted = runs.on_host(6, **options)
    found = runs.on_gpu(6, **options, answer=wanted["tokens"])
    assert found["device"] == "cuda0" and not found["over_budget"]
    assert found["copied"] == found["came"] > 0
    assert found["host_computed"] == found["cold"] > 0
    assert_same_answer(found, wanted)
