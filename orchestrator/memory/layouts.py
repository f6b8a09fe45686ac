"""In which layout slots hold experts: as in the file, or the CPU's own, in which eight rows of a
matrix are interleaved for upstream's repacked kernels."""

from __future__ import annotations

from dataclasses import replace

from gguf_tools.experts import ExpertModel
from gguf_tools.file.layout import GGMLType
from orchestrator.config import Config
from orchestrator.memory.plan import MemoryPlan
from orchestrator.native import Library, StoreSpec

# A token that needs an expert waits until it is laid out, too, and so streaming is slower with the
# CPU's layout even for types whose layout pays after one use (docs/experiments/layouts.md).
RESIDENT_SHARE = 0.99


def wants_own_layout(config: Config, plan: MemoryPlan) -> bool:
    """Whether the CPU's own layout is asked for, or pays with what this plan keeps in memory."""
    if config.layout != "auto":
        return config.layout == "cpu"
    if config.use_extra_bufts is False or plan.slots is None:
        return False
    policy = plan.policy
    if policy is not None and policy.wants.all_resident:
        # Versions change in the background and seldom, unless tokens wait for them.
        return policy.wants.transition_rate > 0
    return plan.slots.total_bytes >= RESIDENT_SHARE * plan.expert_bytes


def with_layouts(
    spec: StoreSpec, config: Config, model: ExpertModel, plan: MemoryPlan, library: Library
) -> StoreSpec:
    """The store whose slots hold what this CPU has a layout of its own for in that layout, where
    the plan wants it. On a device experts are as in the file."""
    if plan.device is not None or not wants_own_layout(config, plan):
        return spec
    layers = []
    for shapes, (il, slices) in zip(model.shapes, spec.layers, strict=True):
        changed = dict(slices)
        for (kind, tier), each in slices.items():
            shape = shapes[kind]
            if shape is not None and library.interleaves(each.type, *shape):
                changed[kind, tier] = replace(each, interleaved_rows=shape[1])
        layers.append((il, changed))
    return replace(spec, layers=tuple(layers))


def layout_text(spec: StoreSpec) -> str:
    """For the mode line: the types that slots hold in the CPU's own layout."""
    slices = [each for _, layer in spec.layers for each in layer.values()]
    types = sorted({GGMLType(each.type).name.lower() for each in slices if each.interleaved_rows})
    return f", {' and '.join(types)} in this CPU's own layout" if types else ""
