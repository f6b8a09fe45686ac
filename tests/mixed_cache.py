"""Our split of the slots between two precisions beside DyMoE's own cache, over a recorded run.

`python tests/mixed_cache.py TRACE [--high q4_k] [--low q2_k]` prints hits, and bytes a decoded
token: of the policy as it is, with and without what it loads ahead; of the same slots shared by all
layers; and of one LRU whose bytes high and low copies share (DyMoE 4.4.2), loading on demand. Reads
and computing have given speeds, so a trace gives the same figures on every machine.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from orchestrator.allocation.critical import gate_order
from orchestrator.allocation.prompts import token_order
from orchestrator.allocation.slots import ModelShape, Rules, SlotGroup, SlotPlan
from orchestrator.events import Phase
from orchestrator.lab.replay import Trace, read_trace
from orchestrator.lab.replay.simulate import Compute, Transport, set_up, simulate
from orchestrator.memory.footprint import model_shape
from orchestrator.native.llama import Bindings
from orchestrator.policy.dymoe import DyMoE

BUDGETS = (0.4, 0.6, 0.8)  # of all experts high
SHARES = (0.75, 0.9)
SPEED = Transport(870 * 10**6, 50, 2)
TOKEN_US = 1500.0
AHEAD = {
    "on demand": {"prefetch": "off"},
    "ahead": {"prefetch": "on"},
    "ahead, critical alone": {"prefetch": "on", "prefetch_low": False},
}


class Shared(DyMoE):
    """Slots of one kind, size and tier evict each other in all layers, as with lru."""

    def plan(self, budget_bytes: int) -> SlotPlan:
        plan = super().plan(budget_bytes)
        shared: dict[tuple[int, int, int], list[int]] = {}
        for (_, kind, tier), group in plan.group_of.items():
            members = shared.setdefault((kind, tier, plan.groups[group].slot_bytes), [])
            members.append(group)
        groups, place = [], {}
        for (_, _, n_bytes), members in shared.items():
            place |= dict.fromkeys(members, len(groups))
            slots = sum(plan.groups[each].n_slots for each in members)
            passing = sum(plan.groups[each].n_passing for each in members)
            groups.append(SlotGroup(n_bytes, slots, passing))
        return SlotPlan(tuple(groups), {key: place[at] for key, at in plan.group_of.items()})


class OneLru:
    """DyMoE 4.4.2: an expert is held in one precision (no duplication); a high request for a low
    copy is a miss that replaces it (promotion); a low request is served by a high copy (reuse).
    What was used longest ago goes first."""

    def __init__(self, shape: ModelShape, budget_bytes: int) -> None:
        self._bytes = [
            [shape.expert_slot_bytes(layer, tier) for tier in (0, 1)]
            for layer in range(shape.n_layers)
        ]
        self._held: OrderedDict[tuple[int, int], int] = OrderedDict()
        self._free = budget_bytes

    def ask(self, layer: int, expert: int, tier: int) -> int:
        """Bytes that were read, 0 for a hit."""
        key = layer, expert
        held = self._held.get(key)
        if held is not None and held <= tier:
            self._held.move_to_end(key)
            return 0
        if held is not None:
            self._free += self._bytes[layer][self._held.pop(key)]
        needed = self._bytes[layer][tier]
        while self._free < needed:
            (of, _), gone = self._held.popitem(last=False)
            self._free += self._bytes[of][gone]
        self._held[key] = tier
        self._free -= needed
        return needed


def requests(trace: Trace, policy: DyMoE) -> Iterator[tuple[Phase, int, int, int]]:
    """(phase, layer, expert, tier) of every routed expert. A prompt's go by the tokens that use
    them."""
    for step in trace.steps():
        for layer, ids, weights, *_ in step.events:
            if len(ids) > 1:
                order, n_used = token_order(ids, None, trace.n_expert)
                experts, t = order[:n_used].tolist(), policy.prefill_critical(layer, n_used)
            else:
                places = gate_order(weights[0].tolist())
                experts, t = [int(ids[0][place]) for place in places], policy.critical[layer]
            for rank, expert in enumerate(experts):
                yield step.phase, layer, expert, int(rank >= t)


def measure(trace: Trace, tiers: tuple[int, int], budget: float, share: float) -> list[str]:
    """A row for each way to hold and to load experts."""
    shape = model_shape(trace, tiers)
    budget_bytes = int(budget * shape.all_slot_bytes())
    decode = trace.arrays["step_phase"] == Phase.DECODE
    n = int(decode.sum())
    rows = []
    time = Compute(TOKEN_US, TOKEN_US, trace.header.dense_share)
    listed = [(name, DyMoE, settings) for name, settings in AHEAD.items()]
    listed += [(f"{name}, all layers", Shared, AHEAD[name]) for name in ("on demand", "ahead")]
    for name, policy_class, settings in listed:
        wanted = DyMoE.Settings.of({"retention": share, **settings})
        made = set_up(trace, policy_class, budget_bytes, wanted, tiers, Rules(), SPEED.threads)
        outcome = simulate(Bindings.load().library(), trace, made, SPEED, time)
        stats, at = outcome.stats, Phase.DECODE
        hits = stats.hits[at] / stats.requests[at]
        read, ahead = stats.demand_bytes[at] / n / 1e3, stats.prefetch_bytes[at] / n / 1e3
        tpot_ms = outcome.step_us[decode].mean() / 1e3
        rows.append(
            f"split, {name:<22} {100 * hits:5.1f} % hits, {read:7.1f} kB on demand, "
            f"{ahead:7.1f} kB ahead, TPOT {tpot_ms:.3f} ms"
        )
    policy = DyMoE(shape, DyMoE.Settings(retention=share))
    cache, asked, hits, read = OneLru(shape, budget_bytes), 0, 0, 0
    for phase, layer, expert, tier in requests(trace, policy):
        n_bytes = cache.ask(layer, expert, tier)
        if phase is Phase.DECODE:
            asked, hits, read = asked + 1, hits + (n_bytes == 0), read + n_bytes
    rows.append(
        f"one LRU of bytes, on demand    {100 * hits / asked:5.1f} % hits, "
        f"{read / n / 1e3:7.1f} kB on demand"
    )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--high", default="q4_k")
    parser.add_argument("--low", default="q2_k")
    asked = parser.parse_args()
    trace = read_trace(asked.trace)
    tiers = trace.tier_index(asked.high), trace.tier_index(asked.low)
    for budget in BUDGETS:
        for share in SHARES:
            print(f"{100 * budget:.0f} % of all high, r = {share}")
            for row in measure(trace, tiers, budget, share):
                print(f"  {row}", flush=True)


if __name__ == "__main__":
    main()
