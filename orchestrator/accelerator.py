"""The GPU that a model runs on, or none."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.errors import ConfigError
from orchestrator.hardware import Device
from orchestrator.llama import Bindings
from orchestrator.native import DeviceInfo, find_device

AUTO, CPU = "auto", "cpu"
_GPU = "cuda"


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A device and what llama.cpp is told about it. index: its number among llama.cpp's GPUs,
    None where all but the experts' slots stays in the host's memory."""

    info: DeviceInfo
    index: int | None
    buffer_type: int

    @property
    def device(self) -> Device:
        """As the planner sees it."""
        info = self.info
        return Device(info.name, info.description, info.memory_bytes, info.total_bytes)


def find_gpu(bindings: Bindings, device: str, vram: int | None = None) -> Accelerator | None:
    """What a setting `device` names; "auto" is the first GPU, if the library was built for any.

    Raises ConfigError for a device that is not here, and for --vram without one.
    """
    name = device
    if name == AUTO:
        name = f"{_GPU}0" if has_gpu_support(bindings) else CPU
    if name == CPU:
        if vram is not None:
            reason = "--device cpu asks for none" if device == CPU else "there is none here"
            raise ConfigError(
                f"--vram caps a GPU's memory, and {reason}: leave it out, or build with "
                f"`make build GPU=cuda` where a GPU is"
            )
        return None
    info = find_device(bindings.library(), name)
    number = info.name.removeprefix(_GPU)
    index = int(number) if number != info.name else None
    return Accelerator(info, index, bindings.library().device_buffer_type(info.handle))


def has_gpu_support(bindings: Bindings) -> bool:
    """Whether llama.cpp was built for GPUs, and sees one."""
    return bool(bindings.api.llama_supports_gpu_offload())
