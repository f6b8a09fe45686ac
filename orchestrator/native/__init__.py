"""The native library of patches/native: the only ctypes for our own C interface."""

from orchestrator.native.abi import ABI_VERSION, MAX_AHEAD, MAX_TIERS, CStats
from orchestrator.native.simulation import Simulation
from orchestrator.native.store import Library, Slices, Store, StoreSpec

__all__ = [
    "ABI_VERSION",
    "MAX_AHEAD",
    "MAX_TIERS",
    "CStats",
    "Library",
    "Simulation",
    "Slices",
    "Store",
    "StoreSpec",
]
