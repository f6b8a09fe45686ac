"""Python access to our C interface in patches/native. Only this package uses ctypes for it."""

from orchestrator.native.abi import (
    ABI_VERSION,
    FAILED,
    MAX_AHEAD,
    MAX_TIERS,
    NO_ROOM,
    CRoom,
    CStats,
)
from orchestrator.native.library import (
    Bandwidths,
    DeviceInfo,
    FreeCores,
    Library,
    ProductTime,
    context_memory,
    find_device,
    host_memory,
    measure_device,
    measure_product,
    slow_copies,
    touched_memory,
)
from orchestrator.native.server import (
    CImages,
    Ending,
    FileMark,
    NativeRequest,
    NativeServer,
    ServerLibrary,
    native_config,
    server_library,
)
from orchestrator.native.spec import Misses, Slices, StoreSpec
from orchestrator.native.store import Store
