"""Which precisions a packed file wants for a memory: those that a resident plan would use there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import NormalDist

import numpy as np

from gguf_tools.experts import ExpertModel
from gguf_tools.file.layout import MAX_TIERS, GGMLType, bits_per_weight, fitting_type
from gguf_tools.units import format_least, format_size
from orchestrator.allocation.hull import Hull
from orchestrator.config import Config
from orchestrator.errors import BudgetError
from orchestrator.memory.machine import Machine
from orchestrator.memory.plan import Refusal, plan
from orchestrator.memory.request import PlanRequest
from orchestrator.policy import BASELINE

# Types that need no importance matrix, and are quick to make.
TYPES = (
    GGMLType.Q8_0,
    GGMLType.Q6_K,
    GGMLType.Q5_K,
    GGMLType.Q4_K,
    GGMLType.Q3_K,
    GGMLType.Q2_K,
)
# What streams: most models are published in the first, and the second is the usual low one.
_STREAMED = (GGMLType.Q4_K, GGMLType.Q2_K)
# How uneven use times loss is between experts, where nobody has measured it: the arithmetic over
# the geometric mean, as on the demo model.
_UNEVENNESS = 1.25
# Experts that stand for all, and how many of them a tier has to have.
_SHARES = 64
_LEAST = 2


def tiers_for(model: ExpertModel, ram_bytes: int) -> tuple[list[str], str]:
    """Names of the tiers, best first, and why these, a sentence. ram_bytes: cap on all that the
    model will take, as --ram.

    The best one is the model's own where it is quantized, else Q8_0: what is lossless here. Where
    all of it fits, it is the only one. Where every expert fits in some type, the others are those
    that an allocation over all types gives to a share of the experts worth having, for experts
    whose use times loss is as uneven as on the demo model. Where none fits, experts come from the
    disk while decoding, high or low. Raises BudgetError for a memory without room for that.
    """
    config = Config.build(model=model.path, ram=ram_bytes, policy=BASELINE)
    found = plan(PlanRequest.of(config), model, Machine(1 << 62))
    if isinstance(found, Refusal):
        raise BudgetError(
            f"--for-ram {format_size(ram_bytes)} is too little for this model: it needs at least "
            f"{format_least(found.needed_bytes)}, in any precisions",
            found.needed_bytes,
        )
    budget = found.budget_bytes
    bits = _bits_of_types(model)
    own = model.tiers[0]
    if own.bpw <= bits_per_weight(GGMLType.Q8_0):
        bits = {each: n for each, n in bits.items() if n < own.bpw}
        best, best_bits = own.name, own.bpw
    else:
        best, best_bits = GGMLType.Q8_0.tier_name, bits.pop(GGMLType.Q8_0)
    n_weights = 8 * model.tier_bytes[0] / own.bpw
    room = f"{format_size(ram_bytes)} have room for {8 * budget / n_weights:.2f} bits a weight"
    if best_bits * n_weights / 8 <= budget:
        return [best], f"{room}: everything fits in {best}."
    lower = _shared(bits, best_bits, 8 * budget / n_weights)
    if not lower:
        names = [each.tier_name for each in _STREAMED if each in bits]
        return [best, *names], f"{room}, too few for every expert: they are read as needed."
    names = [each.tier_name for each in lower]
    return [best, *names], f"{room}: every expert stays in memory, in one of them."


def _bits_of_types(model: ExpertModel) -> dict[GGMLType, float]:
    """Return the bits a weight of each of TYPES, in their order, for a model with these rows. Rows
    that are no multiple of a type's block get another type (FALLBACK of gguf_tools.file.layout),
    and a type that takes no less for it than the one before is left out."""
    rows = {shape[0] for layer in model.shapes for shape in layer if shape}
    found: dict[GGMLType, float] = {}
    for each in TYPES:
        bits = max(bits_per_weight(fitting_type(each, row)) for row in rows)
        if bits < min(found.values(), default=math.inf):
            found[each] = bits
    return found


def _shared(types: Mapping[GGMLType, float], best_bits: float, bits: float) -> list[GGMLType]:
    """Return those of the types below the best tier, with their bits a weight, that experts have in
    an allocation of `bits` a weight; none if they do not suffice."""
    if not types or bits < min(types.values()):
        return []
    sigma = math.sqrt(2 * math.log(_UNEVENNESS))
    normal = NormalDist(0, sigma)
    used = np.exp([normal.inv_cdf((at + 0.5) / _SHARES) for at in range(_SHARES)])
    widths = np.array([best_bits, *types.values()])
    sizes = np.round(1000 * widths).astype(np.int64)
    hull = Hull(used[None, :, None] * 0.25**widths, sizes[None, :])
    tiers = hull.at(int(1000 * bits * _SHARES))
    n = np.bincount(tiers.ravel(), minlength=len(widths))
    chosen = [each for each, has in zip(types, n[1:].tolist(), strict=True) if has >= _LEAST]
    uses = dict(zip(types, n[1:].tolist(), strict=True))
    most = sorted(chosen, key=lambda each: -uses[each])[: MAX_TIERS - 1]
    return [each for each in chosen if each in most]
