"""Refuse quantized checkpoints that llama.cpp's converter cannot read correctly.

It does not know some formats, and reads others without their scales.

The checks use config.json and the names and types of the tensors.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gguf_tools.errors import CheckpointError

_INSTEAD = "convert the original, unquantized checkpoint instead"
_FP8 = ("F8_E4M3", "F8_E5M2")


def check_quantization(
    folder: Path, config: dict[str, Any], dtypes: Mapping[str, str], is_mlx: bool
) -> None:
    """Raise CheckpointError if a checkpoint is quantized in a way that cannot be converted.

    This is the case for checkpoints of MLX and bitsandbytes, and for checkpoints that lack the
    scale of a quantized tensor.

    config: contents of config.json.
    dtypes: safetensors type of each tensor by name.
    is_mlx: whether the metadata of a weight file names MLX as its format.
    """
    text = config.get("text_config")
    configs = [config, text] if isinstance(text, dict) else [config]
    settings = [each["quantization_config"] for each in configs if each.get("quantization_config")]
    settings = [each for each in settings if isinstance(each, dict)]
    groups = config.get("quantization")
    if is_mlx or (isinstance(groups, dict) and "group_size" in groups):
        raise CheckpointError(
            f"{folder}: written by Apple's MLX in a format that llama.cpp's converter cannot read:"
            f" {_INSTEAD}"
        )
    if any(map(_is_bitsandbytes, settings)) or any("bitsandbytes" in name for name in dtypes):
        raise CheckpointError(
            f"{folder}: quantized by bitsandbytes in a format that llama.cpp's converter cannot"
            f" read: {_INSTEAD}"
        )
    for name, dtype in dtypes.items():
        wanted = _scales_of(name, dtype, bool(settings))
        if wanted and not any(each in dtypes for each in wanted):
            raise CheckpointError(
                f"{folder}: tensor {name} has no scale ({wanted[0]} is missing): download the"
                " checkpoint again"
            )


def _is_bitsandbytes(settings: dict[str, Any]) -> bool:
    method = settings.get("quant_method")
    is_loaded_so = settings.get("load_in_4bit") or settings.get("load_in_8bit")
    return str(method).startswith("bitsandbytes") or (method is None and bool(is_loaded_so))


def _scales_of(name: str, dtype: str, has_settings: bool) -> list[str]:
    """Return the names that the scale of a quantized tensor can have in a checkpoint.

    The list is empty if the tensor needs no scale. A missing scale must be found before the
    conversion, because llama.cpp's converter would silently use 1 instead.

    name: name of the tensor. A name that ends in `weight_scale` belongs to the block scales of an
        NVFP4 weight. Block scales are FP8 tensors, so they need a second scale. ModelOpt calls it
        `weight_scale_2`, and compressed-tensors calls it `weight_global_scale`.
    dtype: safetensors type of the tensor.
    has_settings: whether config.json says how the checkpoint is quantized.
    """
    if dtype not in _FP8:
        return []
    base, _, last = name.rpartition(".")
    if last == "weight_scale":
        return [f"{base}.weight_scale_2", f"{base}.weight_global_scale"]
    if last == "weight" and has_settings:
        others = [f"{base}.{each}" for each in ("weight_scale", "scale", "qscale_weight")]
        return [f"{base}.weight_scale_inv", *others]
    return []
