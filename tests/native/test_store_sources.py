"""Cells, slots and reads of the store, each by its own source and nothing else of the store."""

import pytest

from patches.upstream import PATCHES

from .conftest import HERE, run_program

NATIVE = PATCHES / "native"


@pytest.mark.parametrize(
    ("name", "sources", "sanitizer", "said"),
    [
        ("cells_test", ["cells"], "address,undefined", "states of a load"),
        ("slots_test", ["slots"], "address,undefined", "as the list says"),
        ("reads_test", ["reads", "crc32"], "address,undefined", "in their order and at their rate"),
        ("reads_test", ["reads", "crc32"], "thread", "in their order and at their rate"),
    ],
)
def test_alone(name, sources, sanitizer, said, compile_native, tmp_path):
    files = [HERE / f"{name}.cpp", *(NATIVE / f"moe-edge-{source}.cpp" for source in sources)]
    flags = ("-std=c++17", f"-fsanitize={sanitizer}", "-DMOE_EDGE_PART_BYTES=4096")
    program = compile_native(f"{name}_{sanitizer[:6]}", files, *flags, libraries=())
    assert said in run_program(program, *([tmp_path] if name == "reads_test" else []))
