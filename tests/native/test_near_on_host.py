"""The context policy with cold experts in host memory, where the host's threads compute them.

The device is main memory, whose executor reads experts in place. tests/native/cuda tests a GPU.
"""

import numpy as np
import pytest

from orchestrator.errors import BudgetError, PolicyError
from orchestrator.events import Phase
from orchestrator.plan.footprint import exchange_bytes

from . import conftest
from .conftest import drawn
from .cuda.engine_driver import bytes_that_came

PROMPT, ANSWER = drawn(40, 5), drawn(12, 6)


def opened(model, **options):
    asked = {"policy": "context", "hot_experts": 2, "device": "host:100", "placement": "wait"}
    return conftest.opened(model, **(asked | options))


def converse(e):
    rows = [e.eval(PROMPT, 0)[-1]]
    return rows + [e.eval([t], len(PROMPT) + at)[-1] for at, t in enumerate(ANSWER)]


def test_cold_experts_are_not_copied_to_the_device(three):
    """Logits equal those with all experts on the device, and only hot experts are copied there."""
    with opened(three, near_place="device") as runtime, runtime.evaluator() as e:
        wanted = converse(e)
    with opened(three, near_place="host") as runtime, runtime.evaluator() as e:
        store, before = e.inside.store, e.inside.store.resident()
        assert "computed by the CPU" in runtime.mode
        rows = converse(e)
        store.check()
        stats, came = store.stats(), bytes_that_came(e, before)
    assert np.array_equal(rows, wanted)
    assert sum(stats.copy_bytes) == came > 0  # each expert moved once
    for phase in (Phase.PREFILL, Phase.DECODE):
        cold = sum(stats.computed[phase][1:])
        assert stats.host_computed[phase] == cold > 0
    assert list(stats.hits) == list(stats.requests) and sum(stats.demand_bytes) == 0
    assert stats.slot_bytes_peak <= stats.budget_bytes


def test_near_experts_go_to_the_host_if_the_device_is_full(three):
    """Without `--near-place`, near experts go to the host only if necessary.

    This is the case if the device is too small or if near tiers share slots.
    """
    with opened(three) as runtime, runtime.evaluator() as e:
        all_slots = e.plan.slots
        assert all_slots.host_bytes == 0
    small = all_slots.total_bytes // 2
    with opened(three, expert_ram=small) as runtime, runtime.evaluator() as e:
        slots = e.plan.slots
        assert slots.host_bytes > 0 and slots.total_bytes <= small
        converse(e)
        e.inside.store.check()
    with opened(three, near_slots="shared") as runtime, runtime.evaluator() as e:
        slots = e.plan.slots
        assert slots.host_bytes > 0
        converse(e)
        e.inside.store.check()
    with pytest.raises(PolicyError, match="add --near-place host"):
        opened(three, near_slots="shared", near_place="device")
    with pytest.raises(BudgetError):
        opened(three, expert_ram=small, near_place="device")


def test_near_experts_count_against_ram(three):
    """Near experts get their part of --ram before the host cache of the device."""
    with opened(three, near_place="host") as runtime, runtime.evaluator() as e:
        near = e.plan.slots.host_bytes
        rows = exchange_bytes(e.inside.model, e.plan.n_ubatch)
    with pytest.raises(BudgetError, match=r"--ram .* is too small with a GPU") as refused:
        opened(three, near_place="host", ram=1 << 20)
    with pytest.raises(BudgetError) as without:
        opened(three, near_place="device", ram=1 << 20)
    more = refused.value.needed_bytes - without.value.needed_bytes
    # the host cache needs less, because near tiers do not go through it
    assert 0 < more <= near + rows
    with (
        opened(three, near_place="host", ram=refused.value.needed_bytes) as runtime,
        runtime.evaluator() as e,
    ):
        converse(e)
        assert e.plan.host_bytes > 0
