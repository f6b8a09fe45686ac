"""What runs learn of a model: recalled before the first token, kept at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from gguf_tools.errors import GGUFError
from gguf_tools.experts import ExpertModel
from orchestrator.allocation.slots import Transition
from orchestrator.cache.profile import TunedKeeper, UsageKeeper
from orchestrator.config import Config
from orchestrator.cost.planner import Planner
from orchestrator.engine.driver import Driver, PlainDriver
from orchestrator.engine.idle import Then, bring_back
from orchestrator.engine.loss_meter import LossMeter
from orchestrator.engine.probe import Prober, room_for
from orchestrator.engine.sample import sample
from orchestrator.engine.steps import Held
from orchestrator.memory.plan import MemoryPlan
from orchestrator.native.llama import LlamaContext
from orchestrator.policy.base import SpendsLoss, Tunes

_KNOWN = (
    "What skipping experts loses was learned from your answers: the next start may skip some,"
    " within --max-loss."
)


class Learned:
    """Which experts are hot, how often each was used and what it put out (usage), and what policies
    tuned: from earlier runs and from this one.

    notes: what there is to say of it, sentences for the user.
    """

    def __init__(self, config: Config, model: ExpertModel, planner: Planner) -> None:
        self.usage = planner.usage if config.remember else UsageKeeper(config, model)
        self.notes: list[str] = []
        self._prober = Prober(1 + config.sequences)
        self._config, self._model = config, model
        self._tuned = TunedKeeper(config, model)
        self._planner = planner

    def first(self, plan: MemoryPlan) -> Sequence[Transition]:
        """Teaches a plan's policy, and returns what it wants in memory before the first token."""
        policy = plan.policy
        if policy is None:
            return ()
        self._planner.teach(policy, plan.tier_names)
        if isinstance(policy, Tunes):
            tuned = self._tuned.recall(policy.name)
            if tuned is not None:
                policy.recall(tuned)
        return policy.start()

    def probe(
        self,
        plan: MemoryPlan,
        driver: PlainDriver,
        context: LlamaContext,
        held: Held | None,
    ) -> Then | None:
        """Samples a lower tier in use, and probes what is held of an answer; a policy that spends a
        loss goes by what is known then. None where the context was not made for that or lacks the
        room, where what it takes could not be left as it was, or where nobody needs it."""
        names, allowed = plan.tier_names, self._planner.losses.allowed
        if isinstance(driver, Driver) and driver.allowed is not None:
            allowed = driver.allowed
        usage, n = self.usage, 0
        samples = len(names) > 1 and not usage.errors(names).tokens.all()
        if held is not None and not usage.probed().is_exact:
            length, start = len(held.tokens), held.start
            n = room_for(length, length - start, context.n_ctx)
            held = held._replace(tokens=held.tokens[: start + n])
        if (
            not (samples or n)
            or not isinstance(driver, Driver)
            or allowed == 0
            or not self._planner.learns(self._config, plan)
        ):
            return None

        def then(goes_on: Callable[[], bool]) -> None:
            before, found = usage.probed(), None
            if samples:
                self._sample(names, goes_on)
            power = (usage.outputs() + driver.store.outputs().finite()).power()
            if held is not None and n and power is not None:
                low = driver.store.resident() == 1
                found = self._prober.probe(context, driver, power, held, before, allowed, goes_on)
                bring_back(driver.store, low, goes_on)
            if found is not None:
                usage.probe(found)
            elif not samples:
                return
            estimate = self._planner.losses.learned(names, driver.store.outputs())
            if estimate is None:
                return
            if isinstance(driver.policy, SpendsLoss):
                driver.policy.set_estimate(estimate)
                driver.meter = LossMeter(estimate, self._config.exact_tiers)
            elif before.error is None:
                self.notes.append(_KNOWN)

        return then

    def _sample(self, tiers: Sequence[str], goes_on: Callable[[], bool]) -> None:
        """What cannot be read costs as much as skipping; the token that needs it says why."""
        better, lower = map(self._model.tier_index, tiers)
        with suppress(OSError, GGUFError):
            known = self.usage.errors(tiers)
            self.usage.sampled(tiers, sample(self._model, (better, lower), known, goes_on))

    def learn(self, driver: PlainDriver) -> None:
        """Takes in what the policy that runs knows of the model."""
        hotness, used, tuned = driver.hotness(), driver.used(), driver.tuned()
        if hotness is not None:
            self._planner.hotness.learn(hotness)
        if used is not None:
            self.usage.learn(used, driver.outputs())
        if tuned is not None:
            self._tuned.learn(*tuned)

    def save(self) -> None:
        """Keeps it where that is asked for. Raises OSError where a named profile cannot be
        written."""
        self._tuned.save()
        self.usage.save()
        self._planner.hotness.save()
