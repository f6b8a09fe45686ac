"""The functions of moe-edge.h in a loaded library."""

from __future__ import annotations

import ctypes
import sys
from itertools import count, takewhile
from typing import TYPE_CHECKING, Any

from orchestrator.errors import NativeError
from orchestrator.native.abi import ABI_VERSION, FUNCTIONS, STRUCT_BYTES


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
                f"the installed llama_cpp has moe-edge ABI {found}, this Python code needs "
                f"{ABI_VERSION}: run `make build`"
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
                f"run `make build` (missing symbol {name})"
            ) from None

    def managed_architectures(self) -> tuple[str, ...]:
        """The architectures whose experts a store can manage, as GGUF names them."""
        names = takewhile(bool, map(self.architecture, count()))
        return tuple(name.decode() for name in names)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...
