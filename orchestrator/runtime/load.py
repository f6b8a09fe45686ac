"""Loads a planned model: the store, the weights and the context, in this order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import cast

from gguf_tools.experts import ExpertModel
from gguf_tools.units import format_size
from orchestrator.cost.planner import Planner, ResolvedPlan
from orchestrator.errors import ConfigError, GGUFError
from orchestrator.events import Phase
from orchestrator.native import FreeCores, Store, find_device
from orchestrator.native.llama import LlamaContext, Model
from orchestrator.plan.records import Plan, PlanRequest
from orchestrator.runtime.damage import DataCheck, InUse, managed_places
from orchestrator.runtime.driver import Driver, NoopDriver
from orchestrator.runtime.history import History
from orchestrator.runtime.llama_parts import context_of, weights_of
from orchestrator.runtime.loss_meter import LossMeter
from orchestrator.runtime.steps import Sequences, Steps
from orchestrator.runtime.store_layout import StoreSpecs
from orchestrator.runtime.support import try_load

# Gets the name of the current work, and the share that is done, 0 to 1, or None if not known.
Progress = Callable[[str, float | None], None]
Part = FreeCores | LlamaContext | Store | Model

# If a model takes less of a GPU than planned by this share of the cap, it is loaded again with more
# experts. SPARE_BYTES stay free for later steps.
WORTH_LOADING_AGAIN = 0.02
SPARE_BYTES = 8 * 2**20
MOST_LOADS = 3


@dataclass
class Loaded:
    """A model in memory, ready to decode. Made by Loader.load; free it with close.

    driver: drives the policy and the store, or does nothing on llama.cpp's own path. parts: to be
    closed in this order.
    """

    runs: ResolvedPlan
    driver: NoopDriver
    model: Model
    context: LlamaContext
    steps: Steps
    parts: Sequence[Part]

    @property
    def plan(self) -> Plan:
        return self.runs.plan

    @property
    def store_driver(self) -> Driver:
        """The driver of a policy with a store. Raises ConfigError on llama.cpp's own path."""
        if self.driver.store is None:
            raise ConfigError("llama.cpp's own path has no policy and no store")
        return cast(Driver, self.driver)

    def warm_up(self) -> None:
        """Compute a micro-batch and a token with few experts per layer, and forget them.

        This allocates the GPU memory of the kernels.
        """
        with self.driver.warmup_mode():
            # The token comes first: after a prompt, policies would prepare an answer for it.
            for n, phase in ((1, Phase.DECODE), (self.plan.n_ubatch, Phase.PREFILL)):
                self.steps.step([0] * min(n, self.plan.n_ctx - 2), phase)
        self.steps.reset()

    def close(self) -> None:
        """Frees everything; safe to call twice."""
        self.driver.end_idle()
        _close(self.parts)
        self.parts = ()


class Loader:
    """Loads a model on this machine, with the history of earlier runs.

    planner: resolves settings to plans.
    """

    def __init__(self, request: PlanRequest, model: ExpertModel) -> None:
        """request: as of Planner. Raises ConfigError for a device that is not here, NativeError
        without the library.
        """
        self.planner = Planner(request, model)
        self.bindings, self.gpu = self.planner.bindings, self.planner.gpu
        self.history = History(self.planner)
        self._specs = StoreSpecs(request.config, model, self.bindings, self.gpu)
        self._model, self.files = model, InUse(model.files, self._compare)
        # Whether the weights were compared with their checksums, for managed plans and others.
        self._sound: set[bool] = set()
        self._can_be_managed = False

    def _compare(self) -> DataCheck | None:
        """Start to compare what llama.cpp reads with the files' checksums; None if there are none.

        The store compares experts whenever it reads them.
        """
        checksums = self._specs.checksums
        if len(checksums.headers) < len(self._model.parts):
            return None
        without = managed_places(self._model) if False not in self._sound else ()
        return DataCheck(self.bindings.library(), checksums, without)

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU computes. False for the emulated one."""
        return self.gpu is not None and self.gpu.index is not None

    @property
    def on_disk(self) -> str:
        """The tables of the dense weights that stay on disk if experts are managed, as a text.

        Empty if there are none.
        """
        return self._model.lookup_text

    def load(self, runs: ResolvedPlan, progress: Progress | None = None) -> Loaded:
        """Load a plan.

        On a GPU the model is loaded again if a prompt and a token took more memory than planned.
        That would break the cap. It is also loaded again if they took much less, which experts
        could use. Raises MoeEdgeError, and leaves nothing loaded then.
        """
        if not self.on_gpu:
            return self._load(runs, progress)
        same_parts, more = runs.config.with_changes(ubatch=runs.plan.n_ubatch), 0
        for loads_left in reversed(range(MOST_LOADS)):
            free = self._free_at_first
            loaded = self._load(runs, progress)
            try:
                beyond = self._taken_beyond(loaded, free)
            except BaseException:
                loaded.close()
                raise
            if not loads_left or not is_worth_loading_again(runs.plan, beyond):
                break
            loaded.close()
            more += beyond + SPARE_BYTES
            plan = self.planner.plan(same_parts, more)
            runs = ResolvedPlan(runs.request, plan, self.planner.loses(plan))
        return loaded

    @cached_property
    def _free_at_first(self) -> int:
        """Free GPU memory before any model was loaded. Kernels of earlier models count as used."""
        return self._free_bytes()

    def _free_bytes(self) -> int:
        """Return the free memory of the GPU in bytes."""
        assert self.gpu is not None
        return find_device(self.bindings.library(), self.gpu.info.name).memory_bytes

    def _taken_beyond(self, loaded: Loaded, free_before: int) -> int:
        """Return the bytes of GPU memory that a model takes beyond its plan, kernels included.

        Negative if it takes less. free_before: free bytes before it was loaded.
        """
        loaded.warm_up()
        return free_before - self._free_bytes() - loaded.plan.total_bytes

    def _load(self, runs: ResolvedPlan, progress: Progress | None) -> Loaded:
        config, plan = runs.config, runs.plan
        weights = plan.dense_bytes + (0 if plan.managed else plan.expert_bytes)
        parts: list[Part] = []
        try:
            driver, first = NoopDriver(), None
            if plan.placement is not None:
                # before anything is read: a profile that cannot be used is refused here
                policy = self.history.policy(plan.placement)
                first = policy.warm()
                if not self._can_be_managed:
                    # before anything of its size is read
                    try_load(config.model, managed=True, known=self._model)
                    self._can_be_managed = True
                spec = self._specs.of(config, plan)
                store = Store.create(self.bindings.library(), spec)
                parts.append(store)
                driver = Driver(policy, store)
                driver.shared = plan.shared
                estimate = self.planner.losses.estimate(plan.tier_names)
                if estimate is not None:
                    driver.meter = LossMeter(estimate, config.exact_tiers)
            with self._checked(plan):
                model = weights_of(
                    config,
                    plan,
                    self._model,
                    self.bindings,
                    self.gpu,
                    _share_of(f"Loading {format_size(weights)} of weights", progress),
                )
                parts.append(model)
            driver.prepare(first or (), _share_of("Reading experts", progress))
            context = context_of(runs.request, plan, model, self.bindings, self.gpu)
            # the context goes first, then the store, then the model that it was attached to
            parts.insert(0, context)
            if config.adapts_threads and not self.on_gpu:
                parts.insert(0, FreeCores(self.bindings.library(), context.handle))
            sequences = Sequences(context, runs.request.needs.sequences)
            # Without --ctx, the model's own longest context cannot be raised either.
            most = self._model.hparams.context_length
            asked = config.ctx or plan.n_ctx + (plan.n_ctx == most)
            steps = Steps(
                context, driver, sequences, self.bindings.complaint, asked, self.files.check
            )
            context.should_stop = lambda: steps.cancelled
            context.stop = steps.cancel
            return Loaded(runs, driver, model, context, steps, parts)
        except BaseException:
            _close(parts)
            raise

    @contextmanager
    def _checked(self, plan: Plan) -> Iterator[None]:
        """In the block, compare the tensors that llama.cpp reads with their checksums, once."""
        if plan.managed in self._sound:
            yield
            return
        without = managed_places(self._model) if plan.managed else ()
        check = DataCheck(self.bindings.library(), self._specs.checksums, without)
        try:
            yield
            check.finish()
        except GGUFError:
            self.files.check()
            raise
        finally:
            check.stop()
        self._sound.add(plan.managed)


def is_worth_loading_again(plan: Plan, beyond: int) -> bool:
    """Return whether to load a model again that took `beyond` bytes more than planned.

    A GPU driver allocates memory in large steps, and experts gain nothing by a little more of it.
    """
    over_cap = plan.total_bytes + beyond > plan.cap_bytes
    idle = -beyond - SPARE_BYTES
    return over_cap or (plan.absent_bytes > 0 and idle > WORTH_LOADING_AGAIN * plan.cap_bytes)


def _close(parts: Sequence[Part]) -> None:
    for part in parts:
        part.close()


def _share_of(what: str, progress: Progress | None) -> Callable[[float], None] | None:
    return None if progress is None else partial(progress, what)
