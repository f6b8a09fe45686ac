"""A store with transitions, driven without a model. All bytes are compared with the file."""

import ctypes
import zlib
from functools import partial

import numpy as np

from gguf_tools.file.layout import BLOCK, DOWN, GATE, UP, GGMLType, pad
from orchestrator.lab.replay.simulate import Simulation
from orchestrator.native import Slices, Store, StoreSpec
from orchestrator.native.abi import VISIT_CB, CPrefetch

from .conftest import until

N_LAYERS, N_EXPERT, KINDS = 2, 5, (UP, GATE, DOWN)
# By tier. The types q4_k, q2_k, q3_k, iq2_xs and iq1_s are numbers only, because nothing is
# computed.
EXPERT_BYTES, TYPES = (20000, 9000, 8000, 6000, 5000), (12, 10, 11, 17, 19)
HOST_BYTES = 4 << 20  # of a device's host cache: enough for all slices
HIGH, LOW = 0, 1
HELD = 1  # bytes per second: nothing arrives after the first part
US = 1000  # nanoseconds of virtual time


class ExpertFile:
    """A file of random bytes with the slices of some tiers. kinds: the kinds of each layer."""

    def __init__(self, path, n_tiers=2, expert_bytes=EXPERT_BYTES, kinds=(KINDS,) * N_LAYERS):
        self.path = path
        self.tiers = range(n_tiers)
        self.expert_bytes = expert_bytes
        self.offset = {}
        at = 100  # slices do not start at a block
        for layer, some in enumerate(kinds):
            for kind in some:
                for tier in self.tiers:
                    self.offset[layer, kind, tier] = at
                    at += expert_bytes[tier] * N_EXPERT
        self.data = np.random.default_rng(0).bytes(at)
        path.write_bytes(self.data)

    def slice(self, layer, kind, tier, expert):
        start = self.start(layer, kind, tier, expert)
        return self.data[start : start + self.expert_bytes[tier]]

    def start(self, layer, kind, tier, expert):
        return self.offset[layer, kind, tier] + self.expert_bytes[tier] * expert

    def spec(self, slots, device, pools=None, simulated=False):
        """Describe a store whose layers share the pools.

        slots: number of slots in each pool of a kind. pools: the pool of each tier. None: each tier
        has its own pool.
        """
        pool_of = tuple(self.tiers) if pools is None else pools
        sizes = [pad(n, 4096) + 4096 for n in self.expert_bytes]
        if device is not None:
            blocks = [BLOCK[GGMLType(each)].bytes for each in TYPES]
            sizes = [pad(n, block) for n, block in zip(self.expert_bytes, blocks, strict=True)]
        largest = [
            max(sizes[tier] for tier in self.tiers if pool_of[tier] == pool)
            for pool in range(len(slots))
        ]
        groups = list(zip(largest, slots, strict=True)) * len(KINDS)

        def group_of(_layer, kind, tier):
            return len(slots) * KINDS.index(kind) + pool_of[tier]

        more = {"n_expert_used": 2, "max_tokens": 4, "n_io_threads": 3, "host_bytes": HOST_BYTES}
        more |= {"device": device, "simulated": simulated}
        return self.spec_of((KINDS,) * N_LAYERS, self.tiers, TYPES, groups, group_of, **more)

    def spec_of(self, kinds, tiers, types, groups, group_of, **more):
        """Describe a store with these kinds of each layer and these tiers.

        groups: (bytes, number) of each slot group. group_of(layer, kind, i): index of the group for
        tier i.
        """

        def slices(layer, kind, i):
            each = [self.slice(layer, kind, tiers[i], expert) for expert in range(N_EXPERT)]
            at, n_bytes = self.offset[layer, kind, tiers[i]], self.expert_bytes[tiers[i]]
            sums, group = tuple(map(zlib.crc32, each)), group_of(layer, kind, i)
            return Slices(0, at, n_bytes, types[tiers[i]], group, sums)

        layers = [
            (layer, {(kind, i): slices(layer, kind, i) for kind in some for i in range(len(tiers))})
            for layer, some in enumerate(kinds)
        ]
        return StoreSpec(
            files=(self.path,),
            layers=tuple(layers),
            groups=tuple(groups),
            budget_bytes=sum(size * n for size, n in groups),
            n_tiers=len(tiers),
            n_expert=N_EXPERT,
            n_ahead=0,
            **more,
        )


class Driver:
    """A store and the calls that the graph would make.

    simulated: reads move no bytes and take virtual time, 1 us for a low slice, so that the same
    calls always meet the same reads.
    """

    def __init__(self, file, library, slots, device=None, pools=None, simulated=False):
        self.file = file
        self.store = Store.create(library, file.spec(slots, device, pools, simulated))
        self.store.set_route(None, file.tiers[-1])
        self.clock = Simulation(self.store) if simulated else None
        if self.clock is not None:
            self.clock.set_speed(file.expert_bytes[LOW] * 10**6, 0)

    def warm(self, high):
        every_expert = [(layer, e) for layer in range(N_LAYERS) for e in range(N_EXPERT)]
        self.store.warm([(*each, HIGH if each in high else LOW) for each in every_expert])
        self.store.reset_stats()

    def apply(self, layer, experts):
        ids, n = (ctypes.c_int32 * len(experts))(*experts), len(experts)
        assert self.store.library.apply(self.store.handle, layer, ids, None, None, n) == 0

    def prefetch(self, wanted, kind):
        """Prefetch one kind of each (layer, expert, tier)."""
        items = (CPrefetch * len(wanted))(*[(*each, 1 << kind, 0) for each in wanted])
        self.store.library.prefetch(self.store.handle, items, len(wanted))

    def use(self, layer, experts):
        """Return the set of tiers of each expert's matrices. Every byte is checked."""
        seen = self.use_matrices(layer, experts)
        return {expert: set(tiers.values()) for expert, tiers in seen.items()}

    def use_matrices(self, layer, experts):
        """Return, for each expert, the tier of each of its matrices by kind.

        Each matrix must come once. Its bytes are checked, unless simulated.
        """
        ids = (ctypes.c_int32 * len(experts))(*experts)
        seen = {expert: {} for expert in experts}
        wrong = []

        def visit(kind, expert, tier, _, data, size, __):
            name = f"layer {layer}, kind {kind}, tier {tier}, expert {expert}"
            if kind in seen[expert]:
                wrong.append(f"{name}: twice")
            seen[expert][kind] = tier
            right = None if self.clock else self.file.slice(layer, kind, tier, expert)
            if right is not None and ctypes.string_at(data, size) != right:
                wrong.append(f"{name}: wrong bytes")

        for kind in KINDS:
            visited = VISIT_CB(partial(visit, kind))
            done = self.store.library.use(
                self.store.handle, layer, kind, ids, len(experts), visited, None
            )
            assert done == 0, self.store.library.error(self.store.handle)
        assert not wrong
        assert all(len(tiers) == len(KINDS) for tiers in seen.values()), seen
        return seen

    def reading(self):
        """bool [n_layers, n_expert]: in a transition that is not complete."""
        resident, target = self.store.states()
        moving = (resident != target) & ~self.store.landed()
        return moving

    def state(self, layer, expert):
        """Return (current tier, target tier, whether the target is complete) of an expert.

        A complete target takes effect at the next step.
        """
        resident, target = self.store.states()
        landed = bool(self.store.landed()[layer, expert])
        return int(resident[layer, expert]), int(target[layer, expert]), landed

    def arrive(self):
        """Wait until the reads of all transitions are complete."""
        self.store.set_transition_rate(0)
        step = None if self.clock is None else partial(self.clock.advance, US)
        until(lambda: not self.reading().any(), step)
