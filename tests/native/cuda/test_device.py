"""Memory, copies and tickets of the CUDA device."""

from __future__ import annotations

from .conftest import Device


def test_device(device: Device) -> None:
    """Order between lanes, copies from pageable memory, refused pins, what does not fit."""
    assert device.run("device_test", types=("q4_k", "q2_k")).endswith("fine\n")
