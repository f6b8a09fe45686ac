"""Check that a converted model has the RoPE scaling that its config.json specifies.

llama.cpp's converter only logs a warning for an unknown scaling type, and nothing if its class for
the architecture ignores scaling. A model without its scaling runs, but gives wrong answers.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from gguf_tools.errors import ConvertError

_NONE = ("", "default")
# The metadata key (without its architecture) or tensor that the converter writes for each type.
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
    """Check that llama.cpp's converter has written the checkpoint's RoPE scaling.

    Return a note for the user if the scaling is not written but the model still works, otherwise
    "". Raises ConvertError if the model would give wrong answers.

    config: path of config.json, for messages.
    parameters: RoPE parameters as the converter has read them.
    written: names of the metadata keys and tensors that the converter has written.
    """
    chosen = parameters.get("full_attention") or parameters
    kind = str(chosen.get("rope_type") or "").lower()
    if kind in _NONE or any(name.endswith(_WRITTEN.get(kind, "\0")) for name in written):
        return ""
    if kind == "dynamic":
        return (
            f"{config}: the RoPE scaling 'dynamic' is not converted: do not use a context longer"
            " than the one that the model was trained with"
        )
    if kind not in _WRITTEN:
        raise ConvertError(
            f"{config}: llama.cpp's converter does not support the RoPE scaling {kind[:40]!r}, and"
            " without it the model would give wrong answers"
        )
    raise ConvertError(
        f"{config}: llama.cpp's converter does not support the RoPE scaling '{kind}' for this"
        " architecture, and without it the model would give wrong answers"
    )
