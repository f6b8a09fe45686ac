"""Devices of the C interface, and the size of a slot on a device."""

import ctypes

import pytest

from gguf_tools.experts import ExpertModel
from gguf_tools.file.layout import BLOCK, GGMLType, device_slot_bytes, row_bytes
from orchestrator.errors import ConfigError
from orchestrator.native import find_device, measure_device, slow_copies
from orchestrator.native.abi import CBandwidths
from orchestrator.native.llama import Bindings
from orchestrator.plan.machine import runs_flash
from patches.upstream import PATCHES

from .conftest import HERE, run_program

MIB = 1 << 20


def test_a_device_is_found_once(library):
    found = find_device(library, "host")
    assert found.name == found.description == "host"
    assert 0 < found.memory_bytes < found.total_bytes
    assert find_device(library, "host").handle == found.handle
    assert find_device(library, "host:5").handle != found.handle
    # the host device uses the buffer type of a store in memory, because the CPU computes
    assert library.device_buffer_type(found.handle) == library.buffer_type()


@pytest.mark.parametrize("name", ["", "gpu", "cuda", "cuda-1", "host:", "host:x", "cuda1234567890"])
def test_unknown_names_are_refused(library, name):
    with pytest.raises(ConfigError, match="there is no device"):
        find_device(library, name)


def test_a_missing_gpu_is_refused_with_the_reason(library):
    with pytest.raises(ConfigError, match=r"no CUDA|CUDA devices are usable"):
        find_device(library, "cuda99")


def test_a_library_without_a_gpu_has_no_flash_attention_there(one):
    """The backend itself answers whether it supports flash attention."""
    with ExpertModel.open(one) as model:
        assert not runs_flash(Bindings.load(), 0, model, "f16")


def test_copies_are_timed(library):
    device = find_device(library, "host")
    speed = measure_device(library, device, 1)
    assert speed.pinned == 0  # host memory is not pinned for the host device
    assert speed.compute > MIB
    assert speed.pageable > MIB
    assert speed.round_trip_us > 0
    slow_copies(library, device, 8)
    try:
        assert measure_device(library, device, 1).pageable < speed.pageable / 3
    finally:
        slow_copies(library, device, 1)
    assert library.device_copy_times(device.handle, 0) == -1
    no_room = CBandwidths()
    assert library.device_measure(device.handle, 1 << 62, 1, ctypes.byref(no_room)) == -1


def test_measurements_on_a_simulated_clock(compile_native):
    """Measured times of copies, reads, host products and wake-ups equal the simulated ones."""
    parts = [PATCHES / f"native/moe-edge-{part}.cpp" for part in ("devices", "workers")]
    sources = [HERE / "measure_test.cpp", *parts, PATCHES / "native/moe-edge-host-device.cpp"]
    libraries = ("ggml", "ggml-cpu", "ggml-base")
    program = compile_native("measure_test", sources, "-std=c++17", libraries=libraries)
    assert run_program(program, timeout_s=300) == "fine\n"


@pytest.mark.parametrize("quant", [each for each in GGMLType if BLOCK[each].bytes])
def test_slot_bytes_agree_with_python(library, quant):
    """The planner's slot size equals the store's, for every type."""
    block = BLOCK[quant].weights
    for length in (block, 3 * block, 512, 768, 1408 // block * block, 2048):
        if length % block == 0:
            expert_bytes = 5 * row_bytes(quant, length)
            expected = device_slot_bytes(quant, expert_bytes, length)
            assert library.device_slot_bytes(quant, expert_bytes, length) == expected
            assert expected >= expert_bytes
    assert library.device_slot_bytes(-1, 100, 512) == 0
