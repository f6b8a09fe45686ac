"""A simulated expert store in virtual time, for policies whose decisions depend on residency.

The model computes as usual, while the simulated store tracks which experts a disk of a stated speed
would have read by then. The result therefore does not depend on the speed or the load of this
machine's disk. The real store supplies each expert in the tier that was chosen in virtual time.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from time import perf_counter

import numpy as np

from gguf_tools.closing import Closing
from orchestrator.events import ComputedStep, Phase, RouteEvent, distinct, served
from orchestrator.lab.replay.record import measured
from orchestrator.lab.replay.simulate import Simulation, Transport
from orchestrator.native import CStats, Store
from orchestrator.runtime.driver import Driver
from orchestrator.runtime.evaluator import Evaluator

# Number of decode steps that measure the compute time. The first one is discarded.
_STEPS = 9
# The fraction of a layer's compute time that is spent outside its experts.
_DENSE_SHARE = 0.5


def _computing_us(evaluator: Evaluator) -> float:
    """Measure and return the median time of a decode step, without waits for reads.

    The result is in microseconds. Clears the KV cache.
    """
    token = evaluator.tokenize("a")[-1:]
    found = []
    evaluator.reset()
    for pos in range(min(_STEPS, evaluator.n_ctx)):
        waited_us, start = sum(evaluator.inside.store.stats().wait_us), perf_counter()
        evaluator.eval(token, pos, phase=Phase.DECODE)
        took_us = 1e6 * (perf_counter() - start)
        found.append(took_us - (sum(evaluator.inside.store.stats().wait_us) - waited_us))
    evaluator.reset()
    return float(statistics.median(found[1:] or found))


class VirtualStore(Closing):
    """A simulated expert store (cache of experts) for a loaded model, with a disk of a given speed.

    Some policies choose an expert's precision by which experts are in memory. During the
    simulation, such a policy sees the simulated store, so its choices depend on the simulated disk.
    The real store then provides the weights in the chosen precisions, and the model computes with
    them.

    The simulation ends with close. `step_us` has the simulated duration of each decode step, in
    microseconds.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        bandwidth: int | None,
        latency_us: int | None,
        compute_ms: float | None,
    ) -> None:
        """Start the simulation for a loaded model.

        A speed of None is measured: bandwidth and latency by reading the model file, compute time
        by decoding on this machine.
        """
        if bandwidth is None or latency_us is None:
            disk = measured(evaluator.inside)
            bandwidth = bandwidth or disk.bytes_per_s
            latency_us = disk.latency_us if latency_us is None else latency_us
        self._speed = Transport(bandwidth, latency_us, evaluator.config.io_threads)
        self._token_us = _computing_us(evaluator) if compute_ms is None else 1000 * compute_ms
        self.step_us: list[float] = []
        self._inside, real = evaluator.inside, evaluator.inside.store
        spec = replace(real.spec, simulated=True, direct_io=False, exact_tiers=False)
        self._store = Store.create(real.library, spec)
        self._clock = Simulation(self._store)
        self._clock.set_speed(bandwidth, latency_us)
        self._driver = Driver(evaluator.inside.policy, self._store)
        self._driver.set_route(self._decide)
        self._tiers: np.ndarray = np.zeros(spec.n_expert, np.uint8)
        self._step, self._start_ns = -1, 0
        evaluator.inside.driver.set_route(self.on_route)
        real.set_step_done(self.on_step)

    def close(self) -> None:
        """End the simulation and free the simulated expert store.

        From now on, the model's policy sees the real expert store again instead of the simulated
        one.
        """
        self._inside.driver.set_route()
        self._inside.store.set_step_done(self._inside.driver.step_done)
        self._store.close()

    def stats(self) -> CStats:
        """Return the counters of the simulated store."""
        return self._store.stats()

    def as_dict(self) -> dict[str, float | None]:
        """Return the speeds of the simulated disk and computer, and the simulated time per token.

        The dict has these keys:

        - "bandwidth", "latency_us": the disk's bytes per second and latency.
        - "compute_ms": time to compute a token, without waits for the disk.
        - "tpot_ms_mean": mean duration of a decode step; None if there was none.
        """
        mean_us = float(np.mean(self.step_us)) if self.step_us else None
        return {
            "bandwidth": self._speed.bytes_per_s,
            "latency_us": self._speed.latency_us,
            "compute_ms": self._token_us / 1000,
            "tpot_ms_mean": None if mean_us is None else mean_us / 1000,
        }

    def _decide(self, event: RouteEvent) -> None:
        """Let the policy decide about the experts of one layer, from the simulated store.

        If the simulated store has a better copy of an expert than the policy requests, the better
        copy is used.
        """
        self._driver.on_route(event)
        tiers = self._store.decision.tier_array
        resident = self._store.view.resident_array[event.layer]
        self._tiers[:] = served(tiers, resident)

    def on_route(self, event: RouteEvent) -> None:
        """Let the policy choose the precisions for one layer of a step, and apply its choice.

        The policy sees the simulated expert store. The real expert store then supplies the experts
        in the chosen precisions, because the model needs real weights. The simulated clock advances
        by the time of the layer.

        - event: the experts that the router of the layer chose.
        """
        clock, shadow, inside = self._clock, self._store, self._inside
        if event.step != self._step:
            self._step, self._start_ns = event.step, clock.now_ns
            shadow.begin_step(Phase(event.phase))
        clock.route(
            event.layer,
            event.ids_array,
            event.weights_array,
            event.tokens_array,
            event.ahead_ids_array,
            event.ahead_array,
            event.importance_array,
            event.sequences_array,
            event.phases_array,
        )
        decision = inside.store.decision
        decision.tier_array[:] = self._tiers
        decision.renormalize = shadow.decision.renormalize
        inside.store.apply(decision)
        if inside.driver.meter is not None:
            inside.driver.meter.decided(event, inside.store.view, decision)
        experts = distinct(event.ids_array).astype(np.int32)
        ns = 1000 * self._token_us * event.n_tokens / len(shadow.spec.layers)
        clock.compute(event.layer, experts, ns, _DENSE_SHARE, len(experts))

    def on_step(self, step: ComputedStep) -> None:
        """Report a completed step to the policy, with its simulated duration."""
        us = (self._clock.now_ns - self._start_ns) / 1000
        if step.phase is Phase.DECODE:
            self.step_us.append(us)
        unusual, real = None, self._inside.driver
        if real.meter is not None:
            real.meter.step_done(step.phase, step.n_tokens)
            unusual = real.judge_routing(step.n_tokens)
        moves = self._driver.learn(replace(step, us=us), unusual)
        if moves:
            self._store.transition(moves)
