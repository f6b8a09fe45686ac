"""Choice of the tiers of a packed file for a given memory size.

They are those that a resident plan would use.
"""

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
from orchestrator.plan.planning import plan
from orchestrator.plan.records import Machine, PlanRequest, Refusal
from orchestrator.policy import BASELINE

# Types that are quick to quantize and need no importance matrix.
TYPES = (
    GGMLType.Q8_0,
    GGMLType.Q6_K,
    GGMLType.Q5_K,
    GGMLType.Q4_K,
    GGMLType.Q3_K,
    GGMLType.Q2_K,
)
# Types for experts that are read from disk: most models are published in the first, and the second
# is the usual low tier.
_STREAMED = (GGMLType.Q4_K, GGMLType.Q2_K)
# How much usage times loss varies between experts if it was not measured: arithmetic mean divided
# by geometric mean, as on the demo model.
_UNEVENNESS = 1.25
# Number of representative experts, and the minimum number of them that makes a tier worthwhile.
_SHARES = 64
_LEAST = 2


def tiers_for(model: ExpertModel, ram_bytes: int) -> tuple[list[str], str]:
    """Choose the precisions (tiers) in which to pack a model, to run it in this much memory.

    Return the names of the tiers, best first, and a sentence with the reason. The best tier is the
    model's own type if the model is quantized, otherwise Q8_0. Lower tiers are added as follows:

    - If every expert fits in memory in the best tier, none is added.
    - If every expert fits only when some have a lower tier, the tiers with the least expected
      quality loss are added.
    - Otherwise, Q4_K and Q2_K are added, and experts are read from disk while the model runs.

    ram_bytes: the memory for the running model. Raises BudgetError if it is too small.
    """
    config = Config.build(model=model.path, ram=ram_bytes, policy=BASELINE)
    found = plan(PlanRequest(config), model, Machine(1 << 62))
    if isinstance(found, Refusal):
        raise BudgetError(
            f"--for-ram {format_size(ram_bytes)} is too little for this model: the minimum, "
            f"whatever its precisions, is {format_least(found.needed_bytes)}",
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
    allows = (
        f"{format_size(ram_bytes)} of memory allow {8 * budget / n_weights:.2f} bits per weight"
    )
    if best_bits * n_weights / 8 <= budget:
        return [best], f"{allows}. All experts fit in memory in the precision {best}."
    lower = _shared(bits, best_bits, 8 * budget / n_weights)
    if not lower:
        names = [each.tier_name for each in _STREAMED if each in bits]
        why = f"{allows}. Not all experts fit in memory, so missing experts are read from disk."
        return [best, *names], why
    names = [best, *(each.tier_name for each in lower)]
    return names, f"{allows}. All experts fit in memory in a mix of {', '.join(names)}."


def _bits_of_types(model: ExpertModel) -> dict[GGMLType, float]:
    """Return the bits per weight that each of TYPES takes for this model, in their order.

    If a row length is not a multiple of a type's block size, the row gets a fallback type. A type
    that is then no smaller than the type before it is left out.
    """
    rows = {shape[0] for layer in model.shapes for shape in layer if shape}
    found: dict[GGMLType, float] = {}
    for each in TYPES:
        bits = max(bits_per_weight(fitting_type(each, row)) for row in rows)
        if bits < min(found.values(), default=math.inf):
            found[each] = bits
    return found


def _shared(types: Mapping[GGMLType, float], best_bits: float, bits: float) -> list[GGMLType]:
    """Return the types below the best tier that an optimal allocation gives to experts.

    types: maps each type below the best tier to its bits per weight. best_bits: bits per weight of
    the best tier. bits: bits per weight that fit into memory. The result is empty if no type is
    small enough.
    """
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
