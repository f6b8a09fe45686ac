"""Quantized checkpoints that upstream's converter cannot read, or would read without their scales.

Everything here goes by config.json and by the names and types of tensors.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gguf_tools.errors import CheckpointError

_INSTEAD = "convert the checkpoint that it was made from"
_FP8 = ("F8_E4M3", "F8_E5M2")


def check_quantization(
    folder: Path, config: dict[str, Any], dtypes: Mapping[str, str], is_mlx: bool
) -> None:
    """Raise CheckpointError for a checkpoint of MLX or bitsandbytes, and for one with a quantized
    matrix whose scale is missing.

    dtypes: types of all tensors by name, as safetensors names them. is_mlx: whether a file of
    weights says that MLX wrote it.
    """
    text = config.get("text_config")
    configs = [config, text] if isinstance(text, dict) else [config]
    settings = [each["quantization_config"] for each in configs if each.get("quantization_config")]
    settings = [each for each in settings if isinstance(each, dict)]
    groups = config.get("quantization")
    if is_mlx or (isinstance(groups, dict) and "group_size" in groups):
        raise CheckpointError(
            f"{folder}: written by Apple's MLX, which has a form of its own: {_INSTEAD}"
        )
    if any(map(_is_bitsandbytes, settings)) or any("bitsandbytes" in name for name in dtypes):
        raise CheckpointError(
            f"{folder}: quantized by bitsandbytes, in a form that upstream's converter cannot read:"
            f" {_INSTEAD}"
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
    """Names of which a tensor needs one as its scale; none if it needs no scale.

    NVFP4 has scales of blocks in FP8, and one scale of those: `weight_scale_2` as ModelOpt writes
    it, `weight_global_scale` in compressed-tensors. Upstream's converter takes 1 if it is missing.
    It leaves an FP8 matrix without scale as it is.
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
