"""Turns a plan into the spec of a native store: file offsets of the experts, and their slots."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from gguf_tools.experts import ExpertModel
from gguf_tools.experts.slices import LayerSlices
from orchestrator.allocation.slots import SlotPlan
from orchestrator.config import Config
from orchestrator.errors import ConfigError
from orchestrator.native import Misses, ProductTime, Slices, StoreSpec, measure_product
from orchestrator.native.llama import Bindings
from orchestrator.plan.layouts import with_layouts, with_product_times
from orchestrator.plan.machine import Accelerator, serve_misses
from orchestrator.plan.records import Plan
from orchestrator.policy.base import Placement
from orchestrator.runtime.damage import Checksums, with_checksums

StoreLayers = tuple[tuple[int, dict[tuple[int, int], Slices]], ...]


class StoreSpecs:
    """Makes the parameters (StoreSpec) of the expert stores of one model.

    With a GPU, it measures the speed of copies to the GPU and of computing on the host. It measures
    for the first store, and uses the results for later stores, too.
    """

    def __init__(
        self, config: Config, model: ExpertModel, bindings: Bindings, gpu: Accelerator | None
    ) -> None:
        """Keep the arguments. The machine is not measured before the first store needs the results.

        config: the settings with which the model was opened.
        """
        self._config, self._model, self._bindings, self._gpu = config, model, bindings, gpu
        self._product_times: dict[tuple[int, tuple[int, int]], ProductTime | None] = {}

    def of(self, config: Config, plan: Plan) -> StoreSpec:
        """Return all parameters of the expert store for a plan.

        They contain the file offsets and checksums of the experts, the layout of the slots, and the
        way in which cache misses are served. Raises ConfigError for a plan without a store.
        """
        library = self._bindings.library()
        spec = store_spec(config, self._model, plan, self._misses)
        spec = with_layouts(spec, config, self._model, plan, library)
        spec = with_product_times(spec, self._model, self._product_time)
        return with_checksums(spec, self.checksums)

    @cached_property
    def checksums(self) -> Checksums:
        """The checksums of the model's tensors, read from the model's files on first use.

        The list `tensors` of this Checksums object has one item for each tensor, with the tensor's
        checksums.
        """
        return Checksums(self._model)

    @cached_property
    def _misses(self) -> Misses:
        return serve_misses(self._bindings, self._gpu, self._config)

    def _product_time(self, quant: int, shape: tuple[int, int]) -> ProductTime | None:
        at = quant, shape
        if at not in self._product_times:
            library = self._bindings.library()
            self._product_times[at] = measure_product(library, *at, self._misses.threads)
        return self._product_times[at]


def store_spec(config: Config, model: ExpertModel, plan: Plan, misses: Misses) -> StoreSpec:
    """Return the basic parameters of the expert store (a cache of experts in memory) for a plan.

    Call `StoreSpecs.of` for the complete parameters. It adds checksums, compute times, and the
    memory layout of experts that suits the CPU. In the basic parameters, experts have the layout of
    the file.

    plan: the memory plan. misses: how the store handles experts that are missing in a GPU's memory.
    Raises ConfigError for a plan without an expert store.
    """
    placement = plan.placement
    if placement is None:
        raise ConfigError(
            "with --policy plain, llama.cpp runs the model itself, without moe-edge's cache of "
            "experts: choose another --policy"
        )
    return spec_for(
        placement,
        store_layers(model.layer_ids, model.slices, plan.tiers, placement.slots),
        files=tuple(model.files),
        budget_bytes=plan.budget_bytes + placement.slots.host_bytes,
        max_tokens=plan.n_ubatch,
        n_io_threads=config.io_threads,
        direct_io=config.direct_io,
        importance_window=importance_window(config, plan),
        device=plan.device.name if plan.device else None,
        host_bytes=plan.host_bytes,
        misses=misses,
    )


def spec_for(placement: Placement, layers: StoreLayers, **rest: Any) -> StoreSpec:
    """Return the parameters of an expert store that suits a policy.

    placement: the slots in memory that the policy gets, and its requirements. layers: the file
    positions of each layer's experts. rest: the other fields of StoreSpec.
    """
    shape, slots, wants = placement.shape, placement.slots, placement.wants
    return StoreSpec(
        layers=layers,
        groups=tuple((group.slot_bytes, group.n_slots) for group in slots.groups),
        n_passing=tuple(group.n_passing for group in slots.groups),
        on_host=tuple(group.on_host for group in slots.groups),
        n_tiers=len(shape.tiers),
        n_expert=shape.n_expert,
        n_expert_used=shape.n_expert_used,
        n_ahead=wants.n_ahead,
        exact_tiers=placement.rules.exact and bool(wants.asked_in) and not wants.all_resident,
        **rest,
    )


def store_layers(
    layer_ids: Sequence[int],
    slices: Sequence[LayerSlices],
    tiers: Sequence[int],
    slots: SlotPlan,
) -> StoreLayers:
    """Return where the experts of each MoE layer are in the files, and which slots cache them.

    The result has a pair (layer id, {(kind, tier): Slices}) for each MoE layer. A Slices combines
    the file position of the layer's experts, from `slices`, with the number of the slot group that
    caches them, from `slots`. A slot group has slots of one size.

    A kind is a matrix of an expert (up, gate, gate_up or down). A tier of the result is an index
    into `tiers`. For example, with tiers = [0, 2], tier 1 is the file's precision 2.

    - layer_ids: llama.cpp's ids of the MoE layers.
    - slices: the file positions, [layer][kind][precision].
    - tiers: the file's precisions to use, as indices into slices[layer][kind], best first.
    - slots: assigns a slot group to each (layer, kind, tier).
    """
    return tuple(
        (
            il,
            {
                (kind, tier): Slices(
                    each.file_index,
                    each.offset,
                    each.expert_bytes,
                    int(each.type),
                    slots.group_of[layer, kind, tier],
                )
                for kind, by_tier in enumerate(kinds)
                for tier, file_tier in enumerate(tiers)
                if (each := by_tier[file_tier]) is not None
            },
        )
        for layer, (il, kinds) in enumerate(zip(layer_ids, slices, strict=True))
    )


def importance_window(config: Config, plan: Plan) -> int:
    """Return the number of attention queries that determine the importance of a prompt's tokens.

    The importance of a token is the attention that it receives from the last queries of the prompt.
    The result is 0 if the policy does not use importance, and -1 for all queries.
    """
    if plan.placement is None or not plan.placement.wants.importance:
        return 0
    return {"window": config.importance_window, "exact": -1, "load": 0}[config.importance]


def has_flash(config: Config, plan: Plan) -> bool:
    """Return whether llama.cpp should compute flash attention.

    This is False only for `importance=exact`, which needs the attention weights of all queries.
    """
    return importance_window(config, plan) >= 0
