"""Whether the scaling of rotary positions that a config.json asks for is in the converted model.

Upstream's converter logs a warning for a type that it does not know, or nothing if its class for
the architecture handles no scaling. A model without its scaling answers, and is wrong.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from gguf_tools.errors import ConvertError

_NONE = ("", "default")
# What a converted model has for each type: a key without its architecture, or a tensor.
_WRITTEN = {
    "linear": ".rope.scaling.factor",
    "yarn": ".rope.scaling.factor",
    "llama3": "rope_freqs.weight",
    "proportional": "rope_freqs.weight",
    "longrope": "rope_factors_long.weight",
    "su": "rope_factors_long.weight",
    "mrope": ".rope.dimension_sections",
    "xdrope": ".rope.dimension_sections",
    "dynamic": ".rope.scaling.type",
}


def check_rope(config: Path, parameters: dict[str, Any], written: Collection[str]) -> str:
    """Compare rope parameters, as upstream's converter has them, with the names of the keys and
    tensors that it wrote. config: the file that is named.

    Return a note for the user, or "". Raise ConvertError if a scaling is lost.
    """
    chosen = parameters.get("full_attention") or parameters
    kind = str(chosen.get("rope_type") or "").lower()
    if kind in _NONE or any(name.endswith(_WRITTEN.get(kind, "\0")) for name in written):
        return ""
    if kind == "dynamic":
        return (
            f"{config}: the rope type 'dynamic' is not converted; it matters above the length of"
            " context that the model was trained with"
        )
    if kind not in _WRITTEN:
        raise ConvertError(
            f"{config}: the rope type {kind[:40]!r} is unknown to upstream's converter, and the"
            " model would be wrong without it"
        )
    raise ConvertError(
        f"{config}: upstream's converter drops the rope type '{kind}' for this architecture, and"
        " the model would be wrong without it"
    )
