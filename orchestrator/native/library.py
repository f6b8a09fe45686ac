"""The functions of moe-edge.h in a loaded library, and what they say of devices and memory."""

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
    """The moe_edge_* functions of a loaded llama library, ABI checked.

    Raises NativeError where the library is the stock one or another version.
    """

    def __init__(self, lib: ctypes.CDLL) -> None:
        if sys.byteorder != "little" or ctypes.sizeof(ctypes.c_void_p) != 8:
            raise NativeError("moe-edge needs a 64-bit little-endian machine")
        for struct, size in STRUCT_BYTES.items():
            if ctypes.sizeof(struct) != size:
                raise NativeError(
                    f"{struct.__name__} measures {ctypes.sizeof(struct)} bytes, not {size}"
                )
        self.lib = lib
        found = self._find("moe_edge_abi_version")()
        if found != ABI_VERSION:
            raise NativeError(
                f"the installed llama.cpp has moe-edge ABI {found}, this Python code needs "
                f"{ABI_VERSION}: {built.advice()}"
            )
        for name, (restype, argtypes) in FUNCTIONS.items():
            function = self._find(name)
            function.restype = restype
            function.argtypes = argtypes
            setattr(self, name.removeprefix("moe_edge_"), function)

    def _find(self, name: str) -> Any:
        # A symbol of a library that this one depends on (ggml-cpu) is found through it.
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
    """handle is the library's own; name is how it is asked for, description what it calls itself;
    sizes in bytes, memory_bytes what is free now."""

    handle: int
    name: str
    description: str
    memory_bytes: int
    total_bytes: int


class Bandwidths(NamedTuple):
    """Measured speeds of a device and its host.

    pinned, pageable: copies from host memory to the device, in bytes per second; pinned is 0 if the
    driver does not pin memory. round_trip_us: the time until the host sees that the smallest copy
    is complete. compute: bytes of Q4_K weights per second that the host multiplies with one
    token."""

    pinned: float
    pageable: float
    round_trip_us: float
    compute: float


def find_device(library: Library, name: str) -> DeviceInfo:
    """The device of this name, as "cuda0". Raises ConfigError where it is not here."""
    message = ctypes.create_string_buffer(_ERROR_BYTES)
    handle = library.device_find(name.encode(), message, _ERROR_BYTES)
    if not handle:
        raise ConfigError(f"--device {name}: {message.value.decode('utf-8', 'replace')}")
    info = CDeviceInfo()
    library.device_describe(handle, ctypes.byref(info))
    description = info.name.decode("utf-8", "replace")
    return DeviceInfo(handle, name, description, info.free_bytes, info.total_bytes)


def context_memory(library: Library, context: int) -> tuple[int, int]:
    """What a llama_context and its model take without expert slots: bytes of the host's memory,
    and of others."""
    found = CMemory()
    library.get_memory(context, ctypes.byref(found))
    parts = (found.weights, found.cache, found.scratch)
    return sum(each[0] for each in parts), sum(each[1] for each in parts)


def host_memory(library: Library, context: int) -> tuple[int, int]:
    """What the cache of a llama_context, its recurrent states among that, and its graphs take of
    the host's memory, in bytes."""
    found = CMemory()
    library.get_memory(context, ctypes.byref(found))
    return int(found.cache[0]), int(found.scratch[0])


class Touched(NamedTuple):
    """Bytes of the host's memory: what may be taken, what of that is in memory now, and of caches
    what cells take that hold a token."""

    reserved: int
    resident: int
    used: int = 0


class TouchedMemory(NamedTuple):
    """What all contexts of this process have used of their caches, of the scratch that graphs
    compute in, and of ggml's work buffers. Recurrent memories are not among them."""

    cache: Touched
    scratch: Touched
    work: Touched


def touched_memory(library: Library) -> TouchedMemory:
    """Now. The kernel is asked page by page, which takes 0.3 ms for each GiB that is reserved, and
    0.7 more for each that is resident."""
    found = CTouched()
    library.get_touched(ctypes.byref(found))
    cache = Touched(found.cache[0], found.cache[1], found.used)
    return TouchedMemory(cache, Touched(*found.scratch), Touched(*found.work))


class ProductTime(NamedTuple):
    """What the host's threads take to multiply experts with one token, in microseconds: one expert
    more, and what the first one takes beyond that, since the threads slept."""

    each_us: float
    wake_us: float


def measure_product(
    library: Library, quant: int, shape: tuple[int, int], threads: int
) -> ProductTime | None:
    """For experts of this type, shape (row length, rows) each; takes 64 MiB meanwhile. None for a
    type that the host does not multiply."""
    each, wake = ctypes.c_double(), ctypes.c_double()
    outputs = ctypes.byref(each), ctypes.byref(wake)
    if library.measure_product(quant, *shape, threads, *outputs) != 0:
        return None
    return ProductTime(each.value, wake.value)


def measure_device(library: Library, device: DeviceInfo, threads: int) -> Bandwidths:
    """Times copies to a device, and computing on so many threads of the host. Raises ConfigError
    where there is no room for that, or the device is lost."""
    found = CBandwidths()
    if library.device_measure(device.handle, _COPY_BYTES, threads, ctypes.byref(found)) != 0:
        raise ConfigError(
            f"--device {device.name}: copies cannot be timed, it is full or does not answer"
        )
    return Bandwidths(*(getattr(found, name) for name, *_ in CBandwidths._fields_))


class FreeCores:
    """Lets a context of the CPU (a llama_context) choose its threads while it decodes, up to one
    for each core that computing should use. Close it before the context is freed."""

    def __init__(self, library: Library, context: int) -> None:
        self._library, self._context = library, context
        library.adapt_threads(context, default_threads())

    def close(self) -> None:
        """From here on the context keeps the threads that it has; safe to call twice."""
        if self._context:
            self._library.adapt_threads(self._context, 0)
        self._context = 0
