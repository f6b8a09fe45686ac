"""Parse tier names that a user has given."""

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


def unusable_tier(name: str) -> str:
    """Return the error message for a type name that cannot be a precision (tier) of a file.

    The message lists the valid names.
    """
    known = ", ".join(each.tier_name for each in TIER_TYPES)
    found = type_by_name(name)
    if found is None:
        return f"unknown tier {name}: known tiers are {known}"
    if found in IMPORTANCE_TYPES:
        return (
            f"tier {name} needs an importance matrix: let `moe-edge pack` make one (--method"
            f" imatrix or gptq with --calib TEXT) or read one (--imatrix FILE). Tiers that need"
            f" none are {known}"
        )
    return f"tier {name} is for special models only: known tiers are {known}"


def parse_types(names: Sequence[str], importance: bool = False) -> list[GGMLType]:
    """Return the ggml types with the given names, such as `q4_k`.

    Raises QuantizeError if a name is unknown, or if its type cannot be a precision (tier) of a
    file.

    importance: whether types that need an importance matrix are allowed.
    """
    usable = TIER_TYPES + IMPORTANCE_TYPES if importance else TIER_TYPES
    types = []
    for name in names:
        found = type_by_name(name)
        if found is None or found not in usable:
            raise QuantizeError(unusable_tier(name))
        types.append(found)
    return types


def parse_tiers(names: Sequence[str], importance: bool = False) -> list[GGMLType]:
    """Return the ggml types of a packed file's precisions (tiers), given their names.

    Raises QuantizeError if a name is invalid, if the number of tiers is not 1 to MAX_TIERS, or if
    they are not sorted by decreasing bits per weight.

    importance: whether types that need an importance matrix are allowed.
    """
    types = parse_types(names, importance)
    if not 1 <= len(types) <= MAX_TIERS:
        raise QuantizeError(f"{len(types)} tiers, but a file can have 1 to {MAX_TIERS}")
    for high, low in pairwise(types):
        if bits_per_weight(low) >= bits_per_weight(high):
            raise QuantizeError(
                f"tier {low.tier_name} ({bits_per_weight(low):.2f} bits per weight) is not below"
                f" {high.tier_name} ({bits_per_weight(high):.2f}): list the best tier first"
            )
    return types
