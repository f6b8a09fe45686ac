"""The GPU that a model runs on, or none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from gguf_tools.experts import ExpertModel
from gguf_tools.process import default_threads
from orchestrator.config import Config
from orchestrator.errors import ConfigError
from orchestrator.memory.flash import runs_flash
from orchestrator.memory.hardware import Device
from orchestrator.native import (
    Bandwidths,
    DeviceInfo,
    Misses,
    ProductTime,
    StoreSpec,
    find_device,
    measure_device,
)
from orchestrator.native.llama import Bindings

# A type and a shape of experts to what their product takes.
TimeProduct = Callable[[int, tuple[int, int]], ProductTime | None]

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
    """How a GPU gets the experts that it lacks. Measures its link, which takes some tenths of a
    second: what is copied ahead is bounded by its speed, whatever becomes of misses.

    Raises ConfigError for a GPU that does not answer.
    """
    if gpu is None:
        return Misses()
    mode, threads = config.misses or AUTO, config.threads or default_threads()
    if gpu.index is None:  # main memory in the place of a GPU has no link to it
        return Misses(mode, threads=threads)
    return misses_at(measure_device(bindings.library(), gpu.info, threads), threads, mode)


def misses_at(speeds: Bandwidths, threads: int, mode: str = AUTO) -> Misses:
    """Misses served this way, or each the way that is quickest, at these speeds. Where pinning is
    refused there is no link that nobody waits for."""
    return Misses(mode, speeds.pinned, speeds.read, speeds.round_trip_us, threads)


def with_product_times(spec: StoreSpec, model: ExpertModel, timed: TimeProduct) -> StoreSpec:
    """A store's spec with what the host takes to compute each expert, for misses by speeds. timed:
    a product of experts of a type and a shape (row length, rows), None where the host has none."""
    if spec.misses.mode != AUTO or not spec.misses.copy:
        return spec
    found: dict[tuple[int, tuple[int, int]], ProductTime | None] = {}
    layers = []
    for (il, slices), shapes in zip(spec.layers, model.shapes, strict=True):
        with_times = {}
        for (kind, tier), piece in slices.items():
            shape = shapes[kind]
            assert shape is not None
            at = piece.type, shape
            if at not in found:
                found[at] = timed(*at)
            took = found[at]
            with_times[kind, tier] = replace(piece, compute_us=took.each_us if took else 0.0)
        layers.append((il, with_times))
    wake_us = max((took.wake_us for took in found.values() if took), default=0.0)
    misses = replace(spec.misses, round_trip_us=spec.misses.round_trip_us + wake_us)
    return replace(spec, layers=tuple(layers), misses=misses)


def has_gpu_support(bindings: Bindings) -> bool:
    """Whether llama.cpp was built for GPUs, and sees one."""
    return bool(bindings.api.llama_supports_gpu_offload())
