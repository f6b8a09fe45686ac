"""Reads while idle: their order, and when they stop."""

import json
import threading

import numpy as np
import pytest
from shapes import placed

from gguf_tools import synthetic
from gguf_tools.experts import ExpertModel
from orchestrator.allocation.slots import ModelShape
from orchestrator.cache.profile import UsageKeeper, cached_path
from orchestrator.config import Config
from orchestrator.events import ABSENT
from orchestrator.policy import POLICIES
from orchestrator.runtime.idle import Idle, likely

WANTED = [(0, expert, 0) for expert in range(50)]
SECONDS = 600  # timeout for a thread, after which the test fails


class SlowStore:
    """A store whose reads wait for the test's permission, and end without data if cancelled."""

    def __init__(self, fails_at=-1):
        self.read: list[tuple[int, int, int]] = []
        self.begun = threading.Semaphore(0)
        self.go = threading.Semaphore(0)
        self._fails_at = fails_at
        self.cancelled = False

    def cancel(self, on):
        self.cancelled = on
        if on:
            self.go.release()

    def bring(self, layer, expert, tier):
        self.begun.release()
        assert self.go.acquire(timeout=SECONDS)
        if self.cancelled:
            return None
        if len(self.read) == self._fails_at:
            return None
        self.read.append((layer, expert, tier))
        return expert % 2 == 0


def test_stopping_does_not_cancel_the_current_read():
    store = SlowStore()
    idle = Idle(store)
    idle.start(WANTED)
    for _ in range(3):
        assert store.begun.acquire(timeout=SECONDS)
        if len(store.read) < 2:
            store.go.release()
    idle.stop()  # while the third expert is being read
    assert store.read == WANTED[:2] and not store.cancelled
    idle.stop()
    assert not store.begun.acquire(blocking=False)
    assert idle.prefetched == 1  # the second one found no free slot


def test_idle_reads_end_at_the_first_failed_read():
    store = SlowStore(fails_at=4)
    idle = Idle(store)
    store.go.release(50)
    idle.start(WANTED)
    idle.wait()
    assert store.read == WANTED[:4]
    tried = 0
    while store.begun.acquire(blocking=False):
        tried += 1
    assert tried == 5


def shape():
    return ModelShape(4, 2, ("q4_k",), (({0: 64, 1: 64, 3: 64},),) * 2)


def test_the_likeliest_come_first_by_their_share_of_the_layer():
    policy = placed(POLICIES["dymoe"], shape())
    resident = np.full((2, 4), ABSENT, np.uint8)
    resident[0, 1] = 0
    used = np.array([[10.0, 90, 0, 0], [1, 1, 8, 0]])
    asked = likely(policy.wants, resident, used)
    assert asked[:4] == [(1, 2, 0), (0, 0, 0), (1, 0, 0), (1, 1, 0)]
    assert asked[4:] == [(0, 2, 0), (0, 3, 0), (1, 3, 0)]


def test_one_order_over_all_layers_gets_whole_layers():
    policy = placed(POLICIES["lru"], shape())
    resident = np.full((2, 4), ABSENT, np.uint8)
    resident[0, 1] = 0
    used = np.array([[10.0, 90, 0, 20], [1, 1, 8, 0]])
    asked = [expert for _, expert, _ in likely(policy.wants, resident, used)]
    assert asked == [3, 0, 2, 2, 0, 1, 3]
    assert [each[0] for each in likely(policy.wants, resident, used)] == [0, 0, 0, 1, 1, 1, 1]


def test_a_policy_that_keeps_every_expert_asks_for_none():
    slots = tuple(({0: 64, 1: 64, 3: 64}, {0: 32, 1: 32, 3: 32}) for _ in range(2))
    two = ModelShape(4, 2, ("q4_k", "q2_k"), slots)
    policy = placed(POLICIES["dynaexq"], two, budget=2 * 4 * 3 * 40)
    assert policy.wants.all_resident
    assert likely(policy.wants, np.full((2, 4), ABSENT, np.uint8), np.ones((2, 4))) == ()


@pytest.fixture
def model(tmp_path):
    return ExpertModel.open(synthetic.write(tmp_path / "m.gguf", "tiny-olmoe", tiers=("q4_k",)))


def keeper(model, **settings):
    return UsageKeeper(Config.build(model=model.path, **({"remember": True} | settings)), model)


def counts(model, each):
    found = np.zeros((model.n_layers, model.n_expert))
    found[:, 0] = each
    found[:, 1] = 3 * each
    return found


def test_usage_is_kept_with_every_policy(model):
    first = keeper(model, policy="lru")
    assert first.recall() is None
    first.learn(counts(model, 10))
    first.learn(counts(model, 2))  # under another policy, in the same run
    first.save()
    first.save()  # nothing was learned after the first save
    again = keeper(model, policy="dymoe")
    np.testing.assert_allclose(again.recall(), counts(model, 12))
    again.learn(counts(model, 1))
    again.save()
    np.testing.assert_allclose(keeper(model).recall(), counts(model, 13))
    forgets = keeper(model, remember=False)
    forgets.learn(counts(model, 1))
    # kept in memory until the run ends
    np.testing.assert_allclose(forgets.recall(), counts(model, 1))
    forgets.save()
    np.testing.assert_allclose(keeper(model).recall(), counts(model, 13))
    assert keeper(model, remember=False).recall() is None


@pytest.mark.parametrize("older", [{"outputs": {"tokens": [[1]]}, "probed": None}, {"errors": 7}])
def test_profiles_of_older_versions_keep_their_usage(model, older):
    """Fields of older versions are dropped without a note, whatever they hold."""
    first, path = keeper(model), cached_path(model, "usage")
    first.learn(counts(model, 10))
    first.save()
    path.write_text(json.dumps({**json.loads(path.read_text()), **older}))
    again = keeper(model)
    np.testing.assert_allclose(again.recall(), counts(model, 10))
    assert again.note is None
    again.learn(counts(model, 1))
    again.save()
    assert not older.keys() & json.loads(path.read_text()).keys()


def test_a_damaged_profile_is_ignored_with_a_note(model):
    first, path = keeper(model), cached_path(model, "usage")
    first.learn(counts(model, 1))
    first.save()
    good = json.loads(path.read_text())
    for wrong, said in (({"hotness": [[1.0]]}, str(path)), ({"model": "0" * 64}, "another model")):
        path.write_text(json.dumps(good | wrong))
        left = keeper(model)
        assert left.recall() is None
        assert "usage starts again" in str(left.note) and said in str(left.note)


def test_stored_usage_is_limited_so_that_old_use_counts_less(model):
    first = keeper(model)
    first.learn(counts(model, 10**7))
    first.save()
    found = keeper(model).recall()
    assert found.sum(axis=1) == pytest.approx(65_536 * model.n_expert_used)
