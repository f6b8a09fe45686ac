"""Binds the functions of moe-edge.h, and queries devices and memory with them."""

from __future__ import annotations

import ctypes
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from gguf_tools import built
from gguf_tools.process import default_threads
from orchestrator.errors import ConfigError, NativeError
from orchestrator.native.abi import (
    ABI_VERSION,
    FUNCTIONS,
    STRUCT_BYTES,
    CBandwidths,
    CDeviceInfo,
    CMemory,
    CTouched,
)


class Library:
    """The functions of moe-edge.h in a loaded llama library, as attributes without `moe_edge_`.

    Raises NativeError if the library was built without moe-edge, or has another ABI version.
    """

    def __init__(self, lib: ctypes.CDLL) -> None:
        if sys.byteorder != "little" or ctypes.sizeof(ctypes.c_void_p) != 8:
            raise NativeError("moe-edge needs a 64-bit little-endian machine")
        for struct, size in STRUCT_BYTES.items():
            if ctypes.sizeof(struct) != size:
                raise NativeError(
                    f"{struct.__name__} has {ctypes.sizeof(struct)} bytes, but needs {size}: this "
                    "is a bug in orchestrator.native.abi"
                )
        self.lib = lib
        found = self._find("moe_edge_abi_version")()
        if found != ABI_VERSION:
            raise NativeError(
                f"the installed llama.cpp has moe-edge ABI {found}, but this Python code needs "
                f"{ABI_VERSION}: {built.advice()}"
            )
        for name, (restype, argtypes) in FUNCTIONS.items():
            function = self._find(name)
            function.restype = restype
            function.argtypes = argtypes
            setattr(self, name.removeprefix("moe_edge_"), function)

    def _find(self, name: str) -> Any:
        """Return a function of the library by its C name. Raises NativeError if it is missing."""
        # The lookup includes the libraries that libllama depends on (ggml-cpu).
        try:
            return self.lib[name]
        except AttributeError:
            raise NativeError(
                "the installed llama_cpp is the stock package, without the expert store: "
                f"{built.advice()} (missing symbol {name})"
            ) from None

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


_ERROR_BYTES = 512
_COPY_BYTES = 64 << 20


class DeviceInfo(NamedTuple):
    """A GPU, as the native library describes it.

    handle: the library's handle of the GPU. name: value of --device, such as "cuda0". description:
    the name that the driver reports. memory_bytes: free memory. total_bytes: all memory.
    """

    handle: int
    name: str
    description: str
    memory_bytes: int
    total_bytes: int


class Bandwidths(NamedTuple):
    """Measured speeds of a device and its host.

    pinned, pageable: bytes per second of copies to the device from pinned and from pageable host
    memory. The value of pinned is 0 if the driver cannot pin memory. round_trip_us: latency of the
    smallest copy, in microseconds. compute: speed at which the host multiplies weights with one
    token, in bytes of Q4_K weights per second.
    """

    pinned: float
    pageable: float
    round_trip_us: float
    compute: float


def find_device(library: Library, name: str) -> DeviceInfo:
    """Find a GPU by name, such as "cuda0". Raises ConfigError if there is no such GPU."""
    message = ctypes.create_string_buffer(_ERROR_BYTES)
    handle = library.device_find(name.encode(), message, _ERROR_BYTES)
    if not handle:
        raise ConfigError(f"--device {name}: {message.value.decode('utf-8', 'replace')}")
    info = CDeviceInfo()
    library.device_describe(handle, ctypes.byref(info))
    description = info.name.decode("utf-8", "replace")
    return DeviceInfo(handle, name, description, info.free_bytes, info.total_bytes)


def context_memory(library: Library, context: int) -> tuple[int, int]:
    """Return (host bytes, device bytes) that a llama_context and its model take.

    Memory of the expert store is not included. context: handle of the llama_context.
    """
    found = CMemory()
    library.get_memory(context, ctypes.byref(found))
    parts = (found.weights, found.cache, found.scratch)
    return sum(each[0] for each in parts), sum(each[1] for each in parts)


def host_memory(library: Library, context: int) -> tuple[int, int]:
    """Return (KV cache bytes, scratch bytes) of a llama_context in host memory.

    The KV cache includes recurrent states. Scratch memory is used by compute graphs. context:
    handle of the llama_context.
    """
    found = CMemory()
    library.get_memory(context, ctypes.byref(found))
    return int(found.cache[0]), int(found.scratch[0])


class Touched(NamedTuple):
    """The size of a region of host memory, in bytes.

    reserved: bytes that are allocated. resident: bytes that are backed by physical pages now. used:
    for a KV cache, bytes of the cells that hold a token; otherwise 0.
    """

    reserved: int
    resident: int
    used: int = 0


class TouchedMemory(NamedTuple):
    """The host memory of all llama.cpp contexts of this process, reserved and resident (touched).

    Reserved memory becomes resident, page by page, when it is first accessed.

    - cache: the KV caches. Recurrent states are not measured.
    - scratch: scratch memory of compute graphs.
    - work: ggml's work buffers.
    """

    cache: Touched
    scratch: Touched
    work: Touched


def touched_memory(library: Library) -> TouchedMemory:
    """Measure the host memory that all llama.cpp contexts of this process use now.

    The operating system reports it page by page. This takes 0.3 ms per reserved GiB, and another
    0.7 ms per resident GiB.
    """
    found = CTouched()
    library.get_touched(ctypes.byref(found))
    cache = Touched(found.cache[0], found.cache[1], found.used)
    return TouchedMemory(cache, Touched(*found.scratch), Touched(*found.work))


class ProductTime(NamedTuple):
    """The time that the host's threads need to multiply experts with one token, in microseconds.

    each_us: time for each expert. wake_us: extra time for the first expert, to wake up the threads.
    """

    each_us: float
    wake_us: float


def measure_product(
    library: Library, quant: int, shape: tuple[int, int], threads: int
) -> ProductTime | None:
    """Measure the time in which the host's threads multiply an expert's matrix with one token.

    quant: ggml's number of the matrix's quantization type. shape: (row length, number of rows) of
    the matrix. threads: number of threads. The result has times in microseconds. It is None if the
    host cannot multiply this type. Allocates 64 MiB during the measurement.
    """
    each, wake = ctypes.c_double(), ctypes.c_double()
    outputs = ctypes.byref(each), ctypes.byref(wake)
    if library.measure_product(quant, *shape, threads, *outputs) != 0:
        return None
    return ProductTime(each.value, wake.value)


def measure_device(library: Library, device: DeviceInfo, threads: int) -> Bandwidths:
    """Measure the speed of copies to a GPU and the speed of the host's CPU, and return both.

    The CPU multiplies quantized weights with one token. threads: number of CPU threads that
    compute. Raises ConfigError if the GPU has too little free memory or does not respond.
    """
    found = CBandwidths()
    if library.device_measure(device.handle, _COPY_BYTES, threads, ctypes.byref(found)) != 0:
        raise ConfigError(
            f"--device {device.name}: the speed of copies to the device cannot be measured. The "
            "memory of the device is full, or the device does not respond: end other programs that "
            "use the device"
        )
    return Bandwidths(*(getattr(found, name) for name, *_ in CBandwidths._fields_))


def slow_copies(library: Library, device: DeviceInfo, times: int) -> None:
    """Slow down all later copies of experts to a device by the factor `times`, for measurements.

    The device makes each copy `times` times.
    """
    library.device_copy_times(device.handle, times)


class FreeCores:
    """Adapts a context's number of decode threads to the number of free CPU cores.

    A core is free if no other program uses it. context: handle of a llama_context on the CPU. Call
    `close` before the context is freed.
    """

    def __init__(self, library: Library, context: int) -> None:
        self._library, self._context = library, context
        library.adapt_threads(context, default_threads())

    def close(self) -> None:
        """Stop adapting the context's number of threads to the free cores. Safe to call twice."""
        if self._context:
            self._library.adapt_threads(self._context, 0)
        self._context = 0
