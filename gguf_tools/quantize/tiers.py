"""Names of tiers as a user writes them, and the types that they stand for."""

from collections.abc import Sequence
from itertools import pairwise

from gguf_tools.errors import QuantizeError
from gguf_tools.file.layout import (
    IMPORTANCE_TYPES,
    MAX_TIERS,
    TIER_TYPES,
    GGMLType,
    bits_per_weight,
    type_by_name,
)


def unusable(name: str) -> str:
    """Why a name cannot be a tier, and which can, in one sentence."""
    known = ", ".join(each.tier_name for each in TIER_TYPES)
    found = type_by_name(name)
    if found is None:
        return f"unknown tier {name}: known tiers are {known}"
    if found in IMPORTANCE_TYPES:
        return (
            f"tier {name} needs an importance matrix: `moe-edge pack` makes one (--method imatrix"
            f" or gptq with --calib TEXT) or reads one (--imatrix FILE); without one, the tiers"
            f" are {known}"
        )
    return f"tier {name} is for special models only; known tiers are {known}"


def parse_types(names: Sequence[str], importance: bool = False) -> list[GGMLType]:
    """ggml types of tier names. importance: types that need an importance matrix count as well.
    Raises QuantizeError for any other name."""
    usable = TIER_TYPES + IMPORTANCE_TYPES if importance else TIER_TYPES
    types = []
    for name in names:
        found = type_by_name(name)
        if found is None or found not in usable:
            raise QuantizeError(unusable(name))
        types.append(found)
    return types


def parse_tiers(names: Sequence[str], importance: bool = False) -> list[GGMLType]:
    """As ``parse_types``. Raises QuantizeError also where there are none or more than
    ``layout.MAX_TIERS``, or where they are not listed best first by bits per weight."""
    types = parse_types(names, importance)
    if not 1 <= len(types) <= MAX_TIERS:
        raise QuantizeError(f"{len(types)} tiers; a file holds 1 to {MAX_TIERS}")
    for high, low in pairwise(types):
        if bits_per_weight(low) >= bits_per_weight(high):
            raise QuantizeError(
                f"tier {low.tier_name} ({bits_per_weight(low):.2f} bits per weight) is not below"
                f" {high.tier_name} ({bits_per_weight(high):.2f}); list tiers best first"
            )
    return types
