"""The machine: its free memory, its GPU if any, and llama.cpp's memory counts for a model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import psutil

from gguf_tools.experts import KV_TYPES, ExpertModel
from gguf_tools.file.layout import GGMLType
from gguf_tools.process import private_bytes
from gguf_tools.units import format_size
from orchestrator.config import Config
from orchestrator.errors import ConfigError, NativeError
from orchestrator.native import DeviceInfo, Misses, find_device, host_memory, measure_device
from orchestrator.native.ggml import GgmlFunctions, InitParams
from orchestrator.native.llama import Bindings, LlamaContext, Model
from orchestrator.plan.footprint import PROCESS_BYTES, output_tokens
from orchestrator.plan.records import Device, Machine, PlanRequest

AUTO, CPU = "auto", "cpu"
_GPU = "cuda"
_FIRST_GPU = f"{_GPU}0"

# Batch size and KV cells of a sample graph, and bytes for the graph's tensors.
_TOKENS, _CELLS = 512, 1024
_TENSORS_BYTES = 64 << 10


def probe(device: Device | None = None) -> Machine:
    """Measure this machine's free memory, and return it with the given device as a Machine.

    device: the device for the experts; None for host memory. If a cgroup limits the memory of this
    process, only the unused part of this limit counts as free.
    """
    free = psutil.virtual_memory().available
    for limit, used in _cgroup_limits():
        free = min(free, max(0, limit - used))
    return Machine(free + _own_bytes(), device)


def _own_bytes() -> int:
    """Return how much memory this process already uses, at most PROCESS_BYTES.

    probe() counts this memory as free, because a plan later subtracts the memory of the whole
    process. The limit leaves out the memory of another loaded model.
    """
    return min(private_bytes(), PROCESS_BYTES)


def _cgroup_limits(
    root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc/self/cgroup")
) -> list[tuple[int, int]]:
    """Return (limit, bytes in use that cannot be dropped) of each memory cgroup of this process.

    Cgroups of version 1 and of version 2 are read. The limit is the lower one of memory.max and
    memory.high. Above memory.high the kernel reclaims memory continuously, and the process hardly
    makes progress.
    """
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return []
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            base, usage_in = root / "memory", "memory.usage_in_bytes"
            limits_in = ["memory.limit_in_bytes"]
        elif controllers == "":
            base, usage_in = root, "memory.current"
            limits_in = ["memory.max", "memory.high"]
        else:
            continue
        folder = base / path.lstrip("/")
        while folder == base or base in folder.parents:
            found = _read_limit(folder, limits_in, usage_in)
            if found is not None:
                limits.append(found)
            folder = folder.parent
    return limits


def _read_limit(folder: Path, limits_in: Sequence[str], usage_in: str) -> tuple[int, int] | None:
    """Return (limit, bytes in use that cannot be dropped) of the memory cgroup in a folder.

    The result is None if the cgroup has no limit or is unreadable. limits_in: names of the files
    that may hold a limit. usage_in: name of the file that holds the bytes in use.
    """
    limits = []
    for name in limits_in:
        with suppress(OSError, ValueError):  # a file that the kernel lacks, or "max"
            limits.append(int((folder / name).read_text()))
    limit = min(limits, default=2**60)
    if limit >= 2**60:
        return None
    try:
        used = int((folder / usage_in).read_text())
        stat = (folder / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):
        return None
    counters = dict(line.split(maxsplit=1) for line in stat if " " in line)
    prefix = "total_" if "total_inactive_file" in counters else ""
    droppable = sum(int(counters.get(f"{prefix}{name}_file", 0)) for name in ("active", "inactive"))
    return limit, max(0, used - droppable)


def more_than_there(ram: int | None, machine: Machine) -> str | None:
    """Return a note if --ram exceeds the free memory, otherwise None.

    The note says that the free memory is the limit instead. ram: the value of --ram in bytes, or
    None.
    """
    if ram is None or ram <= machine.memory_bytes:
        return None
    free = format_size(machine.memory_bytes)
    return f"--ram {format_size(ram)} is more than the free memory: the limit is {free}."


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A device whose memory holds experts, and the handles by which llama.cpp knows it.

    - info: the name and the memory of the device.
    - index: the device's number among llama.cpp's GPUs. It is None for the device "host", which
      imitates a GPU in main memory for tests.
    - buffer_type: handle of ggml's buffer type for the device's memory.
    """

    info: DeviceInfo
    index: int | None
    buffer_type: int

    @property
    def device(self) -> Device:
        """The name and the memory sizes of this device, as the planner needs them."""
        info = self.info
        return Device(info.name, info.description, info.memory_bytes, info.total_bytes)


def find_gpu(bindings: Bindings, device: str, vram: int | None = None) -> Accelerator | None:
    """Return the device that the setting `device` names, or None for the CPU.

    "gpu" is the first GPU. "auto" is the first GPU if the library was built with GPU support,
    otherwise the CPU. vram: the value of --vram, which is only checked.

    Raises ConfigError for a device that does not exist, and for --vram without a GPU.
    """
    name = _FIRST_GPU if device == "gpu" else device
    if name == AUTO:
        name = _FIRST_GPU if bindings.api.llama_supports_gpu_offload() else CPU
    if name == CPU:
        if vram is not None:
            reason = (
                "--device cpu uses no GPU" if device == CPU else "this build has no GPU support"
            )
            raise ConfigError(
                f"--vram caps a GPU's memory, and {reason}: leave it out, or build with "
                f"`make build GPU=cuda` on a machine with a GPU"
            )
        return None
    info = find_device(bindings.library(), name)
    number = info.name.removeprefix(_GPU)
    index = int(number) if number != info.name else None
    return Accelerator(info, index, bindings.library().device_buffer_type(info.handle))


def planned_device(
    bindings: Bindings, gpu: Accelerator | None, model: ExpertModel, kv: str
) -> Device | None:
    """Return a description of the GPU for the memory planner, or None if `gpu` is None.

    The description has the GPU's name and memory sizes. It also says whether the GPU supports flash
    attention for the model with this type of KV cache.

    gpu: the device whose memory holds experts. kv: the type of the KV cache, such as "f16".
    """
    if gpu is None or gpu.index is None:
        return gpu.device if gpu else None
    return replace(gpu.device, flash=runs_flash(bindings, gpu.index, model, kv))


def one_of_several(bindings: Bindings, gpu: Accelerator | None) -> str | None:
    """Return a note that names the GPU in use if the machine has several GPUs, otherwise None.

    gpu: the GPU in use. If it is None, the result is None.
    """
    if gpu is None or gpu.index is None:
        return None
    n = bindings.count_gpus()
    if n < 2:
        return None
    return f"Using one of {n} GPUs, {gpu.info.name}. Choose another with --device."


def check_misses(gpu: Accelerator | None, config: Config) -> None:
    """Raise ConfigError if --misses was given without a GPU, because it then has no effect."""
    if gpu is None and config.misses is not None:
        raise ConfigError("--misses has no effect without a GPU: leave it out")


def serve_misses(bindings: Bindings, gpu: Accelerator | None, config: Config) -> Misses:
    """Return the settings that say how a GPU handles experts that are not in its memory.

    With `--misses auto`, this function measures the link to the GPU, which takes some tenths of a
    second. Raises ConfigError if the GPU does not respond.
    """
    if gpu is None:
        return Misses()
    mode, threads = config.misses or AUTO, config.n_threads
    if gpu.index is None or mode != AUTO:  # main memory as a device has no link
        return Misses(mode, threads=threads)
    speeds = measure_device(bindings.library(), gpu.info, threads)
    return Misses(mode, speeds.pinned, speeds.round_trip_us, threads)


def runs_flash(bindings: Bindings, gpu: int, model: ExpertModel, kv: str) -> bool:
    """Return whether a GPU supports flash attention for the model.

    gpu: the device's number among llama.cpp's GPUs. kv: KV cache type, a key of KV_TYPES.

    The result is False if the library has no kernel for the attention heads of a layer. It is also
    False for latent attention, because its heads in the KV cache differ from those in the file's
    header.
    """
    hparams = model.hparams
    if f"{hparams.arch}.attention.key_length_mla" in model.metadata:
        return False
    heads = set(zip(hparams.n_head, hparams.n_head_kv, strict=True))
    return all(
        _supports(bindings, gpu, n_head, n_kv, hparams.key_length, hparams.value_length, kv)
        for n_head, n_kv in heads
        if n_kv > 0
    )


def _supports(
    bindings: Bindings, gpu: int, n_head: int, n_head_kv: int, key: int, value: int, kv: str
) -> bool:
    """Return whether ggml's CUDA backend has a flash attention kernel for one layer.

    gpu: the device's number among llama.cpp's GPUs. n_head, n_head_kv: numbers of query heads and
    of key-value heads. key, value: lengths of a key and of a value. kv: KV cache type.
    """
    ggml = GgmlFunctions(bindings.api._lib)
    backend = ggml.backend_reg_by_name(b"CUDA")
    if not backend:
        return False
    ctx = ggml.init(InitParams(_TENSORS_BYTES, None, True))
    try:

        def tensor(kind: GGMLType, *shape: int) -> int:
            made: int = ggml.new_tensor_4d(ctx, int(kind), *shape)
            return made

        of_cache = KV_TYPES[kv]
        queries = tensor(GGMLType.F32, key, _TOKENS, n_head, 1)
        keys = tensor(of_cache, key, _CELLS, n_head_kv, 1)
        values = tensor(of_cache, value, _CELLS, n_head_kv, 1)
        mask = tensor(GGMLType.F16, _CELLS, _TOKENS, 1, 1)
        op = ggml.flash_attn_ext(ctx, queries, keys, values, mask, 1.0, 0.0, 0.0)
        device = ggml.backend_reg_dev_get(backend, gpu)
        return bool(ggml.backend_dev_supports_op(device, op))
    finally:
        ggml.free(ctx)


class Probe:
    """Counts the host memory that llama.cpp needs for a model, without loading its weights.

    Use this as a context manager. The first call of the method `count` reads the header of the
    model file. The model is closed at the end of the `with` block.
    """

    def __init__(self, bindings: Bindings, request: PlanRequest) -> None:
        self._bindings, self._request = bindings, request
        self._known: dict[tuple[int, int], tuple[int, int] | None] = {}

    @cached_property
    def _model(self) -> Model:
        return Model(
            self._bindings,
            self._request.config.model,
            managed=True,
            use_extra_bufts=False,
            use_mmap=False,
            no_data=True,
        )

    def count(self, n_ctx: int, n_ubatch: int) -> tuple[int, int] | None:
        """Return (KV cache bytes, scratch bytes) for a context length and a micro-batch size.

        n_ctx and n_ubatch are in tokens. Scratch is the temporary memory of a step. Buffers that an
        expert store needs to compute the importance of tokens are not counted. The result is None
        if llama.cpp cannot load the model.
        """
        if (n_ctx, n_ubatch) not in self._known:
            self._known[n_ctx, n_ubatch] = self._measured(n_ctx, n_ubatch)
        return self._known[n_ctx, n_ubatch]

    def _measured(self, n_ctx: int, n_ubatch: int) -> tuple[int, int] | None:
        request, config = self._request, self._request.config
        try:
            context = LlamaContext(
                self._bindings,
                self._model,
                n_ctx=n_ctx,
                n_ubatch=n_ubatch,
                threads=1,
                outputs=output_tokens(request, self._model.n_vocab, n_ubatch),
                flash_attention=config.importance != "exact",
                sequences=request.needs.sequences,
                kv=config.kv,
            )
        except NativeError:
            return None
        try:
            return host_memory(self._bindings.library(), context.handle)
        finally:
            context.close()

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *_: object) -> None:
        if "_model" in self.__dict__:
            self._model.close()
            del self._model
