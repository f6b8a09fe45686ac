"""The route node on the device."""

import pytest

TYPES = {"types": ("q4_k", "q2_k", "q8_0"), "more": ("scale.cu", "unary.cu")}


def test_route_node(device):
    """Inputs arrive, the decision's weights return, and all products of a layer share their ids."""
    output = device.run("route_test", "pinned", "q4_K+q2_K", "f16+q8_0", **TYPES, delay_us=100)
    assert output.count("NMSE") == 2


@pytest.mark.parametrize("same_address", ["0", "1"])
def test_memory_that_kernels_cannot_write(emulated, monkeypatch, same_address):
    """If kernels cannot write to host memory, or it is not pinned, the inputs are copied."""
    monkeypatch.setenv("MOE_EMU_SAME_ADDRESS", same_address)
    pinned = "refused" if same_address == "1" else "pinned"
    assert "NMSE" in emulated.run("route_test", pinned, "q4_K+q2_K", **TYPES)
