"""The cache rules of DyMoE 4.4.2: the real store is compared with a model in plain Python.

A state machine drives the store through its C interface over a small file whose bytes identify
their slice. After every request, the statistics and the bytes that an op got must be those of a
legal outcome in `cache_model`. The disk's timing decides whether a prefetch is complete, and about
a layer that needs more slots than there are. Every outcome of some timing is then legal, and no
other.
"""

import os
import time
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from orchestrator.events import Phase
from orchestrator.native import Library

from .cache_driver import DEVICE_SLOT_BYTES, EXPERT_BYTES, KINDS, SLOT_BYTES, Driver, model_counts
from .cache_model import SKIP, Cache, Caches, Layout
from .transition_driver import N_EXPERT, ExpertFile

# Read at collection, because the environment is cleared while a test runs.
SLOW = bool(os.environ.get("MOE_EDGE_SLOW"))

# Situations that a run must cover. Otherwise the test has proved too little.
SITUATIONS = (
    *("hits[0]", "hits[1]", "reuse", "promotions", "evictions", "waves", "cut off", "cancelled"),
    "passing",
    *("prefetch_used", "prefetch_wasted", "prefetch_cancelled", "routed skip[0]", "routed skip[1]"),
)
MAX_STATES = 30 if not SLOW else 400  # states that the model tracks
EXAMPLES = 50 if not SLOW else 3000  # repeated while a situation is missing


# Bytes of the host cache of a device: little more than reads need, or everything.
HOST_BYTES = (1 << 20, 32 << 20)


@st.composite
def layouts(draw, device=None):
    """Draw the tiers of the file that are in use, and a layout with few slots.

    Offsets are filled in later.
    """
    sizes = SLOT_BYTES if device is None else DEVICE_SLOT_BYTES
    tiers = tuple(sorted(draw(st.sets(st.integers(0, 3), min_size=1, max_size=4))))
    mixed = device is None and draw(st.sampled_from((False, False, True)))
    n_layers = draw(st.integers(1, len(KINDS)))
    return tiers, Layout(
        kinds=KINDS[:n_layers],
        n_expert=N_EXPERT,
        n_tiers=len(tiers),
        shared=draw(st.booleans()),
        n_slots=tuple(draw(st.sampled_from((1, 2, 1, 2, 3, 4))) for _ in tiers),
        slot_bytes=tuple(sizes[tiers[0] if mixed else tier] for tier in tiers),
        expert_bytes=tuple(EXPERT_BYTES[tier] for tier in tiers),
        offsets={},
        io_threads=draw(st.sampled_from((1, 1, 1, 2))),
        n_passing=draw(st.integers(0, 2)),
        exact_tiers=draw(st.sampled_from((False, False, False, True))),
        device=device,
        host_bytes=draw(st.sampled_from(HOST_BYTES)),
        mixed=mixed,
    )


class CacheRules(RuleBasedStateMachine):
    """One store and its model. A step routes layers, and each routed layer computes its kinds."""

    library: Library
    file: ExpertFile
    device: str | None
    driver: Driver
    model: Caches
    met: Counter[str]  # over all examples: how often each situation occurred
    failures: list[str]

    def __init__(self):
        super().__init__()
        self.opened = False
        self.layer = 0
        self.wanted = {}
        self.left = []  # kinds of the routed layer that are not yet computed
        self.last = {}

    @initialize(data=st.data(), phase=st.sampled_from(Phase))
    def make(self, data, phase):
        self.tiers, self.layout = data.draw(layouts(self.device))
        self.open_store()
        self.begin_step(phase)

    def open_store(self):
        self.driver = Driver(self.library, self.file, self.tiers, self.layout)
        self.model = Caches(self.layout, MAX_STATES)
        self.opened = True
        self.last = {}

    @rule(phase=st.sampled_from(Phase))
    def begin_step(self, phase):
        """Begin the next step. If a layer is not computed yet, the previous step was aborted."""
        self.met["cut off"] += bool(self.left)
        self.left = []
        if self.model.lost:
            self.close_store()
            self.open_store()
        self.driver.store.begin_step(phase)
        self.model.do(lambda cache: cache.begin_step(phase))

    @precondition(lambda self: self.device is None)
    @rule(data=st.data(), phase=st.sampled_from(Phase))
    def limit(self, data, phase):
        """Change the limit between two steps, while a prefetch may be running."""
        self.begin_step(phase)
        sizes = [size for size, _ in self.driver.store.spec.groups]
        every = self.driver.store.spec.budget_bytes
        n_bytes = data.draw(st.sampled_from((sum(sizes), every)) | st.integers(sum(sizes), every))
        self.met["limits"] += n_bytes < every
        items = self.some_items(data)[:1]  # with more, the model has too many states
        self.driver.prefetch(items)
        self.model.do(lambda cache: cache.prefetch(items))
        while self.driver.store.limit(n_bytes):  # reads into slots above the limit
            time.sleep(0.0005)
        self.model.do(lambda cache: cache.limit(n_bytes))
        if not self.model.keep(Cache.settled):
            self.fail("every legal outcome still uses a slot above the limit")

    def some_items(self, data):
        """Draw a prefetch list.

        Half of it is for experts of the latest routed layer, so that requests meet running reads.
        """
        items = []
        for _ in range(data.draw(st.integers(1, 6))):
            layer, experts = self.layer, list(self.wanted)
            if not experts or data.draw(st.booleans()):
                layer = data.draw(st.integers(0, len(self.layout.kinds) - 1))
                experts = list(range(N_EXPERT))
            one_kind = [1 << kind for kind in self.layout.kinds[layer]]
            mask = data.draw(st.sampled_from((15, 15, *one_kind)))
            tier = data.draw(st.integers(0, self.layout.n_tiers - 1))
            expert, passing = data.draw(st.sampled_from(experts)), data.draw(st.booleans())
            items.append((layer, expert, tier, mask, passing))
        return items

    @precondition(lambda self: not self.left)
    @rule(data=st.data(), read_ahead=st.booleans())
    def route(self, data, read_ahead):
        """A layer requests its experts. read_ahead: a prefetch may be running."""
        some = list(self.wanted)
        if not some or data.draw(st.booleans()):  # otherwise the same experts again, in other tiers
            self.layer = data.draw(st.integers(0, len(self.layout.kinds) - 1))
            n = data.draw(st.integers(1, N_EXPERT))
            some = data.draw(st.permutations(range(N_EXPERT)))[:n]
        tier = st.sampled_from((*range(self.layout.n_tiers), SKIP))
        self.wanted = {expert: data.draw(tier) for expert in some}
        self.left = list(self.layout.computed(self.layer))
        passing = frozenset(e for e in some if data.draw(st.sampled_from((False, False, True))))
        self.met["passing"] += bool(passing)
        items = self.some_items(data) if read_ahead else []
        self.driver.prefetch(items)
        self.driver.apply(self.layer, self.wanted, passing)
        self.model.do(lambda cache: cache.prefetch(items))
        self.model.do(lambda cache: cache.apply(self.layer, self.wanted, passing))

    @precondition(lambda self: self.left)
    @rule(data=st.data(), whole_layer=st.booleans())
    def compute(self, data, whole_layer):
        """Compute the next kind of the routed layer, or all remaining kinds."""
        experts = data.draw(st.permutations(list(self.wanted)))
        for _ in range(len(self.left) if whole_layer else 1):
            kind = self.left.pop(0)
            visits = self.driver.use(self.layer, kind, experts)
            assert visits is not None, "the op is stuck"
            assert sorted(expert for expert, _ in visits) == sorted(experts)
            for expert, tier in visits:
                asked = self.wanted[expert]
                assert (tier == SKIP) == (asked == SKIP)
                assert tier <= asked, f"expert {expert}: tier {asked} requested, {tier} computed"
                self.met["reuse"] += tier < asked
            legal = self.model.use(self.layer, kind, experts, visits)
            if not legal:
                self.fail(f"no timing explains layer {self.layer}, kind {kind}: {visits}")

    @rule(data=st.data(), wait=st.booleans())
    def prefetch(self, data, wait):
        """Prefetch. After the wait, the list is almost certainly read before the next request."""
        items = self.some_items(data)
        self.driver.prefetch(items)
        self.model.do(lambda cache: cache.prefetch(items))
        if wait:
            time.sleep(0.002)

    @precondition(lambda self: self.left)
    @rule(phase=st.sampled_from(Phase))
    def cancel(self, phase):
        """Cancel a step (Ctrl-C): the running op ends at once, and the next step starts clean."""
        self.met["cancelled"] += 1
        self.driver.store.cancel(True)
        assert self.driver.use(self.layer, self.left[0], list(self.wanted)) is None
        self.driver.store.cancel(False)
        self.begin_step(phase)

    @invariant()
    def agrees(self):
        if not self.opened:
            return
        self.driver.store.check()
        seen = self.driver.counts()
        if not self.model.keep(lambda cache: model_counts(cache, seen) == seen):
            expected = [model_counts(cache, seen) for cache in self.model.states]
            differ = min(
                ({k: (v, seen[k]) for k, v in each.items() if v != seen[k]} for each in expected),
                key=len,
            )
            self.fail(f"no legal outcome; the nearest one (expected, seen): {differ}")
        resident = self.driver.store.resident().tolist()
        if not self.model.keep(lambda cache: cache.resident() == resident):
            self.fail(f"no legal outcome has these resident tiers [layer][expert]: {resident}")
        self.last = seen

    def fail(self, message):
        self.failures.append(message)
        raise AssertionError(message)

    def close_store(self):
        self.met["host hits"] += sum(self.driver.store.stats().host_hits)
        self.driver.store.close()
        self.met.update(self.last)
        self.met["lost"] += self.model.lost
        self.met["stores"] += 1

    def teardown(self):
        if self.opened:
            self.close_store()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("cache") / "experts.bin"
    return ExpertFile(path, len(EXPERT_BYTES), EXPERT_BYTES, KINDS)


def test_cache_rules(library, file, device):
    """The store follows the cache rules, and the examples cover every situation."""
    met = Counter()
    failures = []
    attributes = {"library": library, "file": file, "met": met, "failures": failures}
    attributes["device"] = device
    wanted = (*SITUATIONS, *(["host hits" if device else "limits"]))
    for number in range(10):
        try:
            run_state_machine_as_test(
                # In CI, Hypothesis derives its examples from this name.
                type(f"Round{number}", (CacheRules,), attributes),
                settings=settings(
                    max_examples=EXAMPLES,
                    stateful_step_count=30,
                    deadline=None,
                    suppress_health_check=list(HealthCheck),
                ),
            )
        except Flaky as error:
            # The same requests at other times of the disk's work gave another result. Report the
            # first failure.
            raise AssertionError(f"failed once, but not again: {failures[:1]}") from error
        missing = [situation for situation in wanted if not met[situation]]
        if not missing:
            return
    pytest.fail(f"no example covered: {missing}")
