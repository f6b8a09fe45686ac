"""What a policy's deciding takes of a token, without a model: microseconds of a layer's callback.

    python tests/deciding.py [--policies empty,dymoe,floor] [--evict 0,16,64] [--tokens 40]

A simulated store of 48 layers, 8 of 128 experts and one precision calls back as a live one does,
and half of the experts have slots. Before each layer so many MiB are written (--evict), as a
layer's weights would go through the caches: deciding then finds neither its code nor its data
there. `empty` is a policy that decides nothing. Measure on a machine that is quiet.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import ClassVar

import numpy as np

from orchestrator.allocation.estimate import KlEstimate
from orchestrator.allocation.prompts import even_slots, layer_groups
from orchestrator.allocation.slots import ModelShape, SlotPlan
from orchestrator.engine.driver import Driver
from orchestrator.engine.loss_meter import LossMeter
from orchestrator.events import ComputedStep, DecisionBuffer, Phase, RouteEvent, StoreView
from orchestrator.native import Library, Simulation, Slices, Store, StoreSpec
from orchestrator.native.llama import Bindings
from orchestrator.policy import POLICIES
from orchestrator.policy.base import EVERY_STEP, Policy, Wants
from orchestrator.policy.floor import Floor

N_LAYERS, N_EXPERT, K, SLICE_BYTES, KINDS = 48, 128, 8, 589_824, (1, 0, 3)
WARM_UP = 8
SHAPE = ModelShape(
    N_EXPERT, K, ("q4_k",), tuple((dict.fromkeys(KINDS, SLICE_BYTES),) for _ in range(N_LAYERS))
)


class Empty(Policy):
    """Decides nothing."""

    name: ClassVar[str] = "empty"
    wants = Wants(EVERY_STEP)

    def plan(self, budget_bytes: int) -> SlotPlan:
        return layer_groups(SHAPE, [[n] for n in even_slots(SHAPE, budget_bytes)])

    def decide(self, event: RouteEvent, view: StoreView, out: DecisionBuffer) -> None:
        """Nothing."""


def routing(n_tokens: int) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """Of each token and layer the experts [k], by Zipf's law, and their weights [k]."""
    rng = np.random.default_rng(0)
    share = 1 / np.arange(1, N_EXPERT + 1)
    share /= share.sum()
    orders = [rng.permutation(N_EXPERT) for _ in range(N_LAYERS)]

    def chosen(order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        ids = order[rng.choice(N_EXPERT, K, replace=False, p=share)]
        return ids.astype(np.int32), -np.sort(-rng.dirichlet(np.ones(K))).astype(np.float32)

    return [[chosen(order) for order in orders] for _ in range(n_tokens)]


def made(name: str) -> Policy:
    if name == Empty.name:
        return Empty(SHAPE)
    policy = POLICIES[name]
    looks_ahead = "prefetch" in policy.Settings.declared()
    return policy(SHAPE, policy.Settings(**({"prefetch": "on"} if looks_ahead else {})))


def spec_of(policy: Policy, plan: SlotPlan) -> StoreSpec:
    def group(layer: int, kind: int) -> int:
        return plan.group_of[layer, kind, 0]

    layers = tuple(
        (layer, {(kind, 0): Slices(0, 0, SLICE_BYTES, 12, group(layer, kind)) for kind in KINDS})
        for layer in range(N_LAYERS)
    )
    return StoreSpec(
        files=(Path("none"),),
        layers=layers,
        groups=tuple((group.slot_bytes, group.n_slots) for group in plan.groups),
        budget_bytes=SHAPE.all_slot_bytes() // 2,
        n_tiers=1,
        n_expert=N_EXPERT,
        n_expert_used=K,
        max_tokens=1,
        n_ahead=policy.wants.n_ahead,
        n_io_threads=4,
        simulated=True,
    )


def measured(library: Library, name: str, evict_mib: float, n_tokens: int) -> str:
    """A row."""
    policy = made(name)
    plan = policy.plan(SHAPE.all_slot_bytes() // 2)
    tokens = routing(WARM_UP + n_tokens)
    through = np.zeros(int(evict_mib * 2**20) // 8)
    none = np.zeros((0, 1, K), np.int32), np.zeros((0, 1, K), np.float32)
    with Store.create(library, spec_of(policy, plan)) as store:
        driver, clock = Driver(policy, store), Simulation(store)
        if isinstance(policy, Floor):
            nats = np.zeros((N_LAYERS, N_EXPERT, 2))
            nats[..., 1] = 0.02 * np.random.default_rng(1).lognormal(size=nats.shape[:2])
            estimate = KlEstimate("q4_k", nats, np.full(nats.shape[:2], 1 / K**2))
            policy.set_estimate(estimate)
            driver.meter = LossMeter(estimate, exact=False)
        driver.set_route()
        clock.set_speed(10**12, 1)
        steps_us = []
        for step, token in enumerate(tokens):
            store.begin_step(Phase.DECODE)
            if step == WARM_UP:
                store.reset_stats()
            for layer, (ids, weights) in enumerate(token):
                ahead = none
                if policy.wants.n_ahead and layer + 1 < N_LAYERS:
                    ahead = token[layer + 1][0][None, None], token[layer + 1][1][None, None]
                through += 1
                clock.route(layer, ids[None], weights[None], np.zeros(1, np.int32), *ahead)
                for kind in KINDS:
                    clock.use(layer, kind, ids, 1000)
                clock.advance(10**6)
            through += 1
            begin = time.perf_counter()
            driver.step_done(ComputedStep(step, Phase.DECODE, 1, 2e5, (), (), ()))
            steps_us.append(1e6 * (time.perf_counter() - begin))
        stats, phase = store.stats(), Phase.DECODE
        layer_us = stats.callback_us[phase] / stats.callbacks[phase]
    return (
        f"{name:6} {evict_mib:4.0f} MiB between layers: {layer_us:6.1f} us a layer, "
        f"{float(np.median(steps_us)):5.1f} us a step"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policies", default="empty,dymoe,floor")
    parser.add_argument("--evict", default="0,16,64", help="MiB written between two layers")
    parser.add_argument("--tokens", type=int, default=40)
    asked = parser.parse_args()
    library = Bindings.load().library()
    for evict_mib in map(float, asked.evict.split(",")):
        for name in asked.policies.split(","):
            print(measured(library, name, evict_mib, asked.tokens), flush=True)


if __name__ == "__main__":
    main()
