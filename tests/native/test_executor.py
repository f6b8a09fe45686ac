"""The C interface and the executor, tested without Python."""

import subprocess

import numpy as np
import pytest

from patches.upstream import PATCHES

from .conftest import HERE, greedy, opened, run_program

NATIVE = PATCHES / "native"
STORE_SOURCES = (
    *("store", "store-c", "steps", "transitions", "check", "staging", "host-tier", "host-device"),
    *("in-place", "workers", "crc32", "cells", "slots", "reads", "loads", "open", "limit"),
)
STORE = [NATIVE / f"moe-edge-{source}.cpp" for source in STORE_SOURCES]
SANITIZERS = ("thread", "address,undefined")


@pytest.mark.parametrize("standard", ["c99", "c11"])
def test_header_is_plain_c(tmp_path, standard):
    source = tmp_path / "header.c"
    source.write_text('#include "moe-edge.h"\n')
    warnings = ("-pedantic", "-Wall", "-Wextra", "-Werror")
    command = ["cc", f"-std={standard}", *warnings, f"-I{NATIVE}", "-fsyntax-only", str(source)]
    subprocess.run(command, check=True)


def test_mixed_tiers_against_references(compile_native, tmp_path):
    """One tier equals upstream's op bit for bit.

    The NMSE of mixed tiers is below 5e-4 against plain dot products.
    """
    program = compile_native("executor_test", [HERE / "executor_test.cpp"], "-std=c++17")
    output = run_program(program, tmp_path)
    assert "180 cases" in output
    assert "own layout" in output


def test_products_by_host_threads_equal_single_rows(compile_native):
    sources = [HERE / "workers_test.cpp", NATIVE / "moe-edge-workers.cpp"]
    program = compile_native("workers_test", sources, "-std=c++17")
    assert "equal except for rounding" in run_program(program)


@pytest.mark.parametrize(
    ("name", "sources", "sanitizer", "said"),
    [
        ("cells_test", ["cells"], "address,undefined", "states of a load"),
        ("slots_test", ["slots"], "address,undefined", "equal to the list"),
        ("reads_test", ["reads", "crc32"], "address,undefined", "in their order and at their rate"),
        ("reads_test", ["reads", "crc32"], "thread", "in their order and at their rate"),
    ],
)
def test_a_part_alone(name, sources, sanitizer, said, compile_native, tmp_path):
    """Test cells, slots and reads, each without the other sources of the store."""
    files = [HERE / f"{name}.cpp", *(NATIVE / f"moe-edge-{source}.cpp" for source in sources)]
    flags = ("-std=c++17", f"-fsanitize={sanitizer}", "-DMOE_EDGE_PART_BYTES=4096")
    program = compile_native(f"{name}_{sanitizer[:6]}", files, *flags, libraries=())
    assert said in run_program(program, *([tmp_path] if name == "reads_test" else []))


@pytest.fixture(scope="module", params=SANITIZERS)
def compile_stress(request, compile_native):
    """compile_stress(name): NAME.cpp and the store's sources, compiled with a sanitizer."""
    name = request.param.partition(",")[0]
    flags = ("-std=c++17", f"-fsanitize={request.param}", "-DMOE_EDGE_PART_BYTES=4096")
    libraries = ("ggml-cpu", "ggml-base")
    store = compile_native(
        f"store_{name}.so", STORE, *flags, "-shared", "-fPIC", libraries=libraries
    )

    def compile_program(program):
        sources = [HERE / f"{program}.cpp", store]
        return compile_native(f"{program}_{name}", sources, *flags, libraries=libraries)

    return compile_program


def test_store_under_stress(compile_stress, tmp_path):
    """Under load, every byte equals the byte on disk, and `moe_edge_check` passes at any moment.

    The program covers threads, pools with one slot, tiers that share slots, a thousand limits,
    promotions, skips and prefetches. It also covers unreadable parts and a truncated file. It runs
    in host memory and on a device.
    """
    program = compile_stress("store_stress")
    for device in ([], [100]):
        output = run_program(program, tmp_path, 1, 7, *device)
        assert output.count("rounds") == (4 if device else 7)
        assert output.count("transitions:") == (1 if device else 2)
        assert output.count("cut short") == 1
        for end in ("bytes stayed", "nothing waited", "without a hook: done", "store recovered"):
            assert end in output


def test_an_executor_that_never_waits(compile_stress, tmp_path):
    """10,000 steps of swaps, computing and skips on a device, ordered only by its tickets.

    Covers late copies, poisoned slots, misses that are copied or computed by the host, and misses
    divided by speed. Also covers a reader next to a load of an aborted step, static tables, and a
    lost device.
    No row is wrong.
    """
    output = run_program(compile_stress("device_stress"), tmp_path, 10_000, 3)
    assert output.count("none wrong") == 6
    assert "places: by speed" in output
    assert "tables uploaded" in output
    assert output.count("remembered for the slot") == 1
    assert "then refused by the host's memory" in output
    assert output.count("ahead: ") == 1
    assert "published when they had completed" in output
    assert "reported once" in output
    assert output.count("lost device: reported") == 2


def test_model_without_python(compile_native, one):
    """A C program decodes with experts on disk and gets the same tokens as an evaluator."""
    program = compile_native("plain_c", [HERE / "plain_c.c"], "-std=c11")
    prompt, n = [5, 6, 7, 8], 16
    tokens, memory = run_program(program, one, 2, n, *prompt).splitlines()
    peak, budget = map(int, memory.split())
    assert peak <= budget

    with (
        opened(one, ctx=512, threads=2, use_extra_bufts=False) as runtime,
        runtime.evaluator() as e,
    ):
        rows = greedy(e, prompt, n)
    assert list(map(int, tokens.split())) == rows[:-1].argmax(axis=1).tolist()
    assert np.isfinite(rows).all()


def test_upstreams_own_operator_tests(operator_tests):
    """Upstream's operator tests pass, with a second CPU backend as the reference."""
    # all operator tests would take over ten minutes
    some = "type_a=(q8_0|q4_K|q2_K),type_b=f32,n_mats=(4|8),n_used=[1-4],b=.,m=512,n=(1|32),"
    output = run_program(operator_tests, "test", "-o", "MUL_MAT_ID", "-b", "CPU", "-p", some)
    assert "56/56 tests passed" in output
