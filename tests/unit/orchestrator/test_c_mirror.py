"""The Python mirror of moe-edge.h against the header itself, as a C compiler reads it."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from orchestrator import events
from orchestrator.native import abi

HEADER = Path(__file__).resolve().parents[3] / "patches" / "native" / "moe-edge.h"
STRUCTS = {
    "moe_edge_slices": abi.CSlices,
    "moe_edge_group": abi.CGroup,
    "moe_edge_layer": abi.CLayer,
    "moe_edge_config": abi.CConfig,
    "moe_edge_event": abi.CEvent,
    "moe_edge_step": abi.CStep,
    "moe_edge_prefetch_item": abi.CPrefetch,
    "moe_edge_decision": abi.CDecision,
    "moe_edge_stats": abi.CStats,
    "moe_edge_touched": abi.CTouched,
    "moe_edge_room": abi.CRoom,
}
CONSTANTS = {
    "MOE_EDGE_ABI_VERSION": abi.ABI_VERSION,
    "MOE_EDGE_MAX_TIERS": abi.MAX_TIERS,
    "MOE_EDGE_MAX_AHEAD": abi.MAX_AHEAD,
    "MOE_EDGE_N_KINDS": abi.N_KINDS,
    "MOE_EDGE_MAX_PREFETCH": events.MAX_PREFETCH,
    "MOE_EDGE_SKIP": events.SKIP,
    "MOE_EDGE_ABSENT": events.ABSENT,
    "MOE_EDGE_PREFILL": int(events.Phase.PREFILL),
    "MOE_EDGE_DECODE": int(events.Phase.DECODE),
    "MOE_EDGE_DIRECT_IO": abi.DIRECT_IO,
    "MOE_EDGE_SIMULATED": abi.SIMULATED,
    "MOE_EDGE_FAILED": abi.FAILED,
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Sizes, offsets and constants by C expression."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler (cc, gcc or clang)")
    wanted = [f"sizeof(struct {name})" for name in STRUCTS]
    for name, mirror in STRUCTS.items():
        wanted += [f"offsetof(struct {name}, {field[0]})" for field in mirror._fields_]
        wanted += [f"sizeof(((struct {name} *) 0)->{field[0]})" for field in mirror._fields_]
    wanted += list(CONSTANTS)
    lines = "".join(f'    printf("%lld\\n", (long long) ({each}));\n' for each in wanted)
    folder = tmp_path_factory.mktemp("abi")
    source = folder / "abi.c"
    source.write_text(f'#include <stdio.h>\n#include "{HEADER}"\nint main(void) {{\n{lines}}}\n')
    program = folder / "abi"
    subprocess.run([compiler, "-Werror", "-o", program, source], check=True)
    output = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    return dict(zip(wanted, map(int, output.split()), strict=True))


@pytest.mark.parametrize("name", STRUCTS)
def test_struct(compiled: dict[str, int], name: str) -> None:
    mirror = STRUCTS[name]
    assert ctypes.sizeof(mirror) == compiled[f"sizeof(struct {name})"] == abi.STRUCT_BYTES[mirror]
    for field, *_ in mirror._fields_:
        descriptor = getattr(mirror, field)
        assert descriptor.offset == compiled[f"offsetof(struct {name}, {field})"], field
        assert descriptor.size == compiled[f"sizeof(((struct {name} *) 0)->{field})"], field


def test_every_field_is_mirrored() -> None:
    text = re.sub(r"//[^\n]*", "", HEADER.read_text())
    for name, mirror in STRUCTS.items():
        match = re.search(rf"struct {name} {{(.*?)\n}};", text, re.DOTALL)
        assert match is not None, name
        fields = re.findall(r"(\w+)(?:\[[^\]]*\])*;", match.group(1))
        assert fields == [field[0] for field in mirror._fields_], name


def test_constants(compiled: dict[str, int]) -> None:
    assert {name: compiled[name] for name in CONSTANTS} == CONSTANTS


def test_every_function_takes_as_many_arguments() -> None:
    text = re.sub(r"//[^\n]*", "", HEADER.read_text())
    declared = {}
    for match in re.finditer(r"MOE_EDGE_API[^;]*?(moe_edge_\w+)\((.*?)\);", text, re.DOTALL):
        arguments = re.sub(r"\(\*\w+\)\([^)]*\)", "", match.group(2)).strip()
        declared[match.group(1)] = 0 if arguments == "void" else arguments.count(",") + 1
    mirrored = {name: len(types) for name, (_, types) in abi.FUNCTIONS.items()}
    assert mirrored == {name: declared.get(name) for name in mirrored}
