"""Experts that are not hot stay on the host of a GPU, whose threads compute them."""

import pytest

from .conftest import Runs
from .test_engine import assert_same_answer


@pytest.mark.parametrize(("n_hot", "n_prompt"), [(1, 12), (3, 12), (1, 80)])
def test_not_one_byte_of_a_cold_expert_is_copied(device, three, n_hot, n_prompt):
    """Every byte that the GPU gets of experts behind the start is of one that the placement made
    hot, and each of these once; the host computes all others, in the prompt too, where many rows
    of one expert are a product of matrices."""
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
