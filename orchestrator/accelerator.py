"""The GPU that a model runs on, or none."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gguf_tools.experts import ExpertModel
from gguf_tools.process import default_threads
from orchestrator.config import Config
from orchestrator.errors import ConfigError
from orchestrator.flash import runs_flash
from orchestrator.hardware import Device
from orchestrator.llama import Bindings
from orchestrator.native import Bandwidths, DeviceInfo, Misses, find_device, measure_device

AUTO, CPU = "auto", "cpu"
_GPU = "cuda"
_FIRST_GPU = f"{_GPU}0"


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
    """What a setting `device` names; "gpu" is the first one, and so is "auto" if the library was
    built for any.

    Raises ConfigError for a device that is not here, and for --vram without one.
    """
    name = _FIRST_GPU if device == "gpu" else device
    if name == AUTO:
        name = _FIRST_GPU if has_gpu_support(bindings) else CPU
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


def planned_device(
    bindings: Bindings, gpu: Accelerator | None, model: ExpertModel, kv: str
) -> Device | None:
    """The GPU as this model is planned for it. kv: the precision of its cache."""
    if gpu is None or gpu.index is None:
        return gpu.device if gpu else None
    return replace(gpu.device, flash=runs_flash(bindings, gpu.index, model, kv))


def one_of_several(bindings: Bindings, gpu: Accelerator | None) -> str | None:
    """A sentence where there are other GPUs than the one in use, which stay idle."""
    if gpu is None or gpu.index is None:
        return None
    n = bindings.count_gpus()
    if n < 2:
        return None
    return f"One of {n} GPUs is used, {gpu.info.name}: --device names another."


def check_misses(gpu: Accelerator | None, config: Config) -> None:
    """Raises ConfigError for --misses without a GPU."""
    if gpu is None and config.misses is not None:
        raise ConfigError(
            "--misses says how a GPU gets the experts that it lacks, and none is in use: "
            "leave it out"
        )


def serve_misses(bindings: Bindings, gpu: Accelerator | None, config: Config) -> Misses:
    """How a GPU gets the experts that it lacks. Where that is for speeds to say, measures them,
    which takes some tenths of a second.

    Raises ConfigError for a GPU that does not answer.
    """
    if gpu is None:
        return Misses()
    mode, threads = config.misses or AUTO, config.threads or default_threads()
    if mode != AUTO or gpu.index is None:  # main memory in the place of a GPU has no link to it
        return Misses(mode, threads=threads)
    return misses_at(measure_device(bindings.library(), gpu.info, threads), threads)


def misses_at(speeds: Bandwidths, threads: int) -> Misses:
    """Each miss the way that is quickest at these speeds."""
    return Misses(AUTO, speeds.pinned, speeds.read, speeds.compute, speeds.round_trip_us, threads)


def has_gpu_support(bindings: Bindings) -> bool:
    """Whether llama.cpp was built for GPUs, and sees one."""
    return bool(bindings.api.llama_supports_gpu_offload())
