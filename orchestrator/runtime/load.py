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
from orchestrator.runtime.driver import BaseDriver, Driver
from orchestrator.runtime.history import History
from orchestrator.runtime.llama_parts import context_of, load_weights
from orchestrator.runtime.loss_meter import LossMeter
from orchestrator.runtime.steps import Sequences, Steps
from orchestrator.runtime.store_layout import StoreSpecs
from orchestrator.runtime.support import try_load

# Gets the name of the current work, and the share that is done, 0 to 1, or None if not known.
Progress = Callable[[str, float | None], None]
Part = FreeCores | LlamaContext | Store | Model

# A model is loaded again with more experts, if it takes less GPU memory than planned by more than
# this share of the cap. SPARE_BYTES stay free for later steps.
WORTH_LOADING_AGAIN = 0.02
SPARE_BYTES = 8 * 2**20
MOST_LOADS = 3


@dataclass
class Loaded:
    """A model in memory, ready to decode. Loader.load makes the object; free it with close.

    - runs: the memory plan and the configuration with which the model was loaded.
    - driver: connects the policy with the expert store, or does nothing on llama.cpp's own path
      (`--policy plain`).
    - model, context: llama.cpp's model, and its context with the KV cache.
    - steps: the object that computes tokens with the model.
    - parts: the objects that close must close, in this order.
    """

    runs: ResolvedPlan
    driver: BaseDriver
    model: Model
    context: LlamaContext
    steps: Steps
    parts: Sequence[Part]

    @property
    def plan(self) -> Plan:
        """The memory plan: sizes of weights, expert slots and context."""
        return self.runs.plan

    @property
    def store_driver(self) -> Driver:
        """The driver that connects the policy with the expert store.

        Raises ConfigError if the model runs without an expert store (`--policy plain`).
        """
        if self.driver.store is None:
            raise ConfigError(
                "with --policy plain, llama.cpp runs the model itself, without moe-edge's cache of "
                "experts: choose another --policy"
            )
        return cast(Driver, self.driver)

    def warm_up(self) -> None:
        """Compute one token and one micro-batch, and drop their tokens again.

        The GPU driver allocates the memory of all kernels meanwhile, so that it can be measured.
        Only a few experts per layer are used.
        """
        with self.driver.warmup_mode():
            # The token comes first: after a prompt, policies would prepare an answer for it.
            for n, phase in ((1, Phase.DECODE), (self.plan.n_ubatch, Phase.PREFILL)):
                self.steps.step([0] * min(n, self.plan.n_ctx - 2), phase)
        self.steps.reset()

    def close(self) -> None:
        """Free the context, the expert store and the model. Safe to call twice."""
        self.driver.end_idle()
        _close(self.parts)
        self.parts = ()


class Loader:
    """Loads the expert store, the weights and the context of a model, as a plan says.

    planner: makes plans from settings. history: the recorded expert usage of the model. files:
    watches the model's files for changes.
    """

    def __init__(self, request: PlanRequest, model: ExpertModel) -> None:
        """Prepare to load a model. Nothing is loaded yet.

        request: the settings, and the memory and sequences that the program needs. Raises
        ConfigError if the device does not exist, and NativeError if the native library is not
        installed.
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
        """Start a thread that verifies the checksums of the tensors that llama.cpp reads.

        Return None if a file has no checksums. The expert store verifies experts itself, whenever
        it reads them.
        """
        checksums = self._specs.checksums
        if len(checksums.headers) < len(self._model.parts):
            return None
        without = managed_places(self._model) if False not in self._sound else ()
        return DataCheck(self.bindings.library(), checksums, without)

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU computes the model. False for an emulated GPU."""
        return self.gpu is not None and self.gpu.index is not None

    @property
    def on_disk(self) -> str:
        """A text with the names and sizes of the model's lookup tables; empty if it has none.

        A lookup table is a tensor, such as the token embeddings, of which a token needs only a few
        rows. It stays on disk, except with `--policy plain`.
        """
        return self._model.lookup_text

    def load(self, runs: ResolvedPlan, progress: Progress | None = None) -> Loaded:
        """Load a model into memory as a plan says, and return it.

        On a GPU, a first prompt and token show how much memory the model really takes. If this
        exceeds the memory cap or leaves much of it free, the model is loaded again, with fewer or
        more experts in GPU memory.

        runs: the plan. progress: gets the name of the current work, and the share of it that is
        done. Raises MoeEdgeError, and then leaves nothing loaded.
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
        """The number of free bytes of GPU memory before the first model was loaded, measured once.

        Memory that kernels take until the process ends is still free at that time.
        """
        return self._free_bytes()

    def _free_bytes(self) -> int:
        """Return the free memory of the GPU in bytes."""
        assert self.gpu is not None
        return find_device(self.bindings.library(), self.gpu.info.name).memory_bytes

    def _taken_beyond(self, loaded: Loaded, free_before: int) -> int:
        """Return how many bytes of GPU memory a loaded model takes in addition to its plan.

        The result includes the memory of kernels. It is negative if the model takes less than
        planned. free_before: free bytes before the model was loaded.
        """
        loaded.warm_up()
        return free_before - self._free_bytes() - loaded.plan.total_bytes

    def _load(self, runs: ResolvedPlan, progress: Progress | None) -> Loaded:
        config, plan = runs.config, runs.plan
        weights = plan.dense_bytes + (0 if plan.managed else plan.expert_bytes)
        parts: list[Part] = []
        try:
            driver, first = BaseDriver(), None
            if plan.placement is not None:
                # A profile that cannot be used is refused here, before anything is read.
                policy = self.history.policy(plan.placement)
                first = policy.warm()
                if not self._can_be_managed:
                    # A model that cannot be managed is refused here, before its weights are read.
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
                model = load_weights(
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
            # The context is closed first, then the store, then the model.
            parts.insert(0, context)
            if config.adapts_threads and not self.on_gpu:
                parts.insert(0, FreeCores(self.bindings.library(), context.handle))
            sequences = Sequences(context, runs.request.needs.sequences)
            # A context with the model's own maximum length cannot be raised.
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
        """Verify the checksums of the tensors that llama.cpp reads, while the `with` block runs.

        Raises GGUFError at the end of the block for a damaged file. The tensors are verified once
        for all plans with an expert store, and once for all plans without. Later blocks verify
        nothing.
        """
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
    """Return whether to load a model again because its GPU memory differs from the plan.

    The result is True if the model uses more than the memory cap, or if so much memory is free that
    many more experts would fit. beyond: bytes that the model uses in addition to the plan; negative
    if it uses less.
    """
    over_cap = plan.total_bytes + beyond > plan.cap_bytes
    idle = -beyond - SPARE_BYTES
    return over_cap or (plan.absent_bytes > 0 and idle > WORTH_LOADING_AGAIN * plan.cap_bytes)


def _close(parts: Sequence[Part]) -> None:
    for part in parts:
        part.close()


def _share_of(what: str, progress: Progress | None) -> Callable[[float], None] | None:
    return None if progress is None else partial(progress, what)
