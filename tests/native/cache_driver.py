"""A real store over a small file with known bytes, and direct calls of it."""

import ctypes
import threading

from gguf_tools.file.layout import BLOCK, GGMLType, pad
from orchestrator.events import Phase
from orchestrator.native import MAX_TIERS, Store
from orchestrator.native.abi import VISIT_CB, CPrefetch

from .cache_model import DOWN, GATE, GATE_UP, SKIP, UP
from .conftest import HANG_S

KINDS = ((UP, GATE, DOWN), (GATE_UP, DOWN), (UP, DOWN), (UP, GATE, DOWN))  # in each layer
TYPES = (8, 12, 11, 10)  # q8_0, q4_K, q3_K, q2_K
# Bytes of an expert in each tier of the file. No slice starts at a block boundary. A read takes
# long enough that requests meet it while it runs.
EXPERT_BYTES = (90_001, 60_001, 40_001, 20_001)
SLOT_BYTES = tuple((n + 2 * 4096) // 4096 * 4096 for n in EXPERT_BYTES)
DEVICE_SLOT_BYTES = tuple(
    pad(n, BLOCK[GGMLType(each)].bytes) for n, each in zip(EXPERT_BYTES, TYPES, strict=True)
)


def make_store(library, file, tiers, layout):
    """Create a store with this layout. Write the file's offsets into the layout."""
    for (layer, kind, tier), offset in file.offset.items():
        if layer < len(layout.kinds) and tier in tiers:
            layout.offsets[layer, kind, tiers.index(tier)] = offset

    def group_of(layer, kind, i):
        return layout.pools.index(layout.pool((layer, kind, 0), i))

    groups = [(layout.slot_bytes[tier], layout.n_slots[tier]) for _, _, tier in layout.pools]
    more = {"n_expert_used": 1, "max_tokens": 1, "direct_io": False, "device": layout.device}
    more |= {"n_io_threads": layout.io_threads, "host_bytes": layout.host_bytes}
    more |= {"n_passing": (layout.n_passing,) * len(groups), "exact_tiers": layout.exact_tiers}
    spec = file.spec_of(layout.kinds, tiers, TYPES, groups, group_of, **more)
    return Store.create(library, spec)


class Driver:
    """Direct calls of one store. A call fails if an op gets bytes of the wrong tier."""

    def __init__(self, library, file, tiers, layout):
        self.file, self.tiers, self.layout = file, tiers, layout
        self.store = make_store(library, file, tiers, layout)
        self.native = library

    def apply(self, layer, wanted, passing=frozenset()):
        n = len(wanted)
        ids = (ctypes.c_int32 * n)(*wanted)
        asked = (ctypes.c_uint8 * n)(*wanted.values())
        passes = (ctypes.c_uint8 * n)(*(expert in passing for expert in wanted))
        assert self.native.apply(self.store.handle, layer, ids, asked, passes, n) == 0

    def prefetch(self, items):
        array = (CPrefetch * len(items))()
        for c_item, item in zip(array, items, strict=True):
            c_item.layer, c_item.expert, c_item.tier, c_item.kinds, c_item.passing = item
        self.native.prefetch(self.store.handle, array, len(items))

    def use(self, layer, kind, experts):
        """Compute experts.

        Return the visits (expert, tier) in the order of the op, or None if the step was cancelled.
        """
        visits = []
        wrong = []

        def visit(expert, tier, ggml, data, n_bytes, _):
            visits.append((expert, tier))
            if tier == SKIP:
                if data or n_bytes:
                    wrong.append(f"expert {expert} is skipped but has bytes")
                return
            in_file = self.tiers[tier]
            expected = self.file.slice(layer, kind, in_file, expert)
            if ggml != TYPES[in_file] or ctypes.string_at(data, n_bytes) != expected:
                wrong.append(f"expert {expert} does not have the bytes of tier {tier}")

        stuck = threading.Timer(HANG_S, self.store.cancel, (True,))
        stuck.start()
        ids, handle = (ctypes.c_int32 * len(experts))(*experts), self.store.handle
        try:
            status = self.native.use(handle, layer, kind, ids, len(experts), VISIT_CB(visit), None)
        finally:
            stuck.cancel()
        assert not wrong, wrong
        return visits if status == 0 else None

    def counts(self):
        """The statistics, under the names that the model uses."""
        stats = self.store.stats()
        by_phase = ["requests", "hits"]
        if self.layout.device is None:  # on a device, bytes in the host cache are not read again
            by_phase += ["demand_bytes", "prefetch_bytes"]
        seen = {
            f"{name}[{phase}]": getattr(stats, name)[phase] for name in by_phase for phase in Phase
        }
        for phase in Phase:
            for tier in range(len(self.tiers)):
                seen[f"routed {tier}[{phase}]"] = stats.routed[phase][tier]
                seen[f"computed {tier}[{phase}]"] = stats.computed[phase][tier]
            seen[f"routed skip[{phase}]"] = stats.routed[phase][MAX_TIERS]
        for name in ("waves", "promotions", "evictions", "prefetch_used", "prefetch_wasted"):
            seen[name] = getattr(stats, name)
        for name in ("prefetch_cancelled", "slot_bytes_peak", "slot_bytes_in_use"):
            seen[name] = getattr(stats, name)
        assert stats.slot_bytes_in_use <= stats.slot_bytes_peak <= stats.budget_bytes
        assert stats.host_bytes <= self.layout.host_bytes
        return seen


def model_counts(cache, names):
    counts = cache.counts | {"slot_bytes_in_use": cache.slot_bytes_in_use()}
    return {name: counts.get(name, 0) for name in names}
