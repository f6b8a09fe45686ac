"""What Python shares with C: the mirror of moe-edge.h as a C compiler reads it, a store over a stub
library, and views of native memory."""

import ctypes
import dataclasses
import json
import math
import re
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from shapes import make_decision, make_event, make_shape, make_view, prefetches

from gguf_tools import built
from orchestrator import events
from orchestrator.errors import NativeError
from orchestrator.events import GenerationStats, Phase, percentile
from orchestrator.native import ABI_VERSION, Library, Slices, Store, StoreSpec, abi

HERE = Path(__file__).resolve().parent
HEADER = HERE.parents[2] / "patches" / "native" / "moe-edge.h"


def compile_c(source, target, *flags):
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler (cc, gcc or clang)")
    subprocess.run([compiler, *flags, "-o", target, source], check=True)


def shared(source, folder, *flags):
    compile_c(source, folder / "lib.so", "-shared", "-fPIC", *flags)
    return ctypes.CDLL(str(folder / "lib.so"))


def compile_stub(folder, abi=ABI_VERSION):
    return shared(HERE / "stub_store.c", folder, f'-DSTUB_HEADER="{HEADER}"', f"-DSTUB_ABI={abi}")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return Library(compile_stub(tmp_path_factory.mktemp("stub")))


SPEC = StoreSpec(
    files=(Path("experts.gguf"),),
    layers=tuple(
        (il, {(kind, 0): Slices(0, 4096 * kind, 100, 12, int(kind == 3)) for kind in (0, 1, 3)})
        for il in (1, 2)
    ),
    groups=((4096, 3), (8192, 5)),
    budget_bytes=10**6,
    n_tiers=1,
    n_expert=4,
    n_expert_used=2,
    max_tokens=8,
    n_ahead=1,
    n_io_threads=2,
)


@pytest.fixture
def store(library):
    with Store.create(library, SPEC) as made:
        yield made
    library.lib.stub_live.restype = ctypes.c_int
    assert library.lib.stub_live() == 0


def step(store, layer, phase=Phase.DECODE):
    store.begin_step(phase)
    return int(store.library.lib.stub_step(ctypes.c_void_p(store.handle), layer))


CANCELLED = 2  # of what the stub was told last


@pytest.mark.parametrize("error", [KeyError("odd"), KeyboardInterrupt(), SystemExit(3)])
def test_exception_in_the_route_is_raised_by_the_step(store, error):
    def route(_event):
        raise error

    store.set_route(route)
    assert step(store, 0) == 1
    with pytest.raises(type(error)) as caught:
        store.check_step()
    assert caught.value is error
    store.set_route(None)
    assert step(store, 0) == 0
    store.check_step()


def test_native_reason_is_raised(store):
    store.set_route(lambda event: None)
    step(store, 0)
    store._on_route = lambda _user: 1
    store.set_route(lambda event: None)
    assert step(store, 0) == 1
    with pytest.raises(NativeError, match="the route callback failed"):
        store.check_step()


def test_creation_refused_with_a_reason(library):
    with pytest.raises(NativeError, match="not the stub's"):
        Store.create(library, dataclasses.replace(SPEC, groups=((4096, 3), (8192, 4))))


def test_exception_in_progress_stops_the_warming(store):
    def progress(_share):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.warm([(0, 0, 0), (0, 1, 0), (0, 2, 0)], progress)
    assert not store.library.lib.stub_seen(ctypes.c_void_p(store.handle), CANCELLED)
    assert store.warm([(0, 0, 0)]) == 1


def test_closed_store_says_so(library):
    store = Store.create(library, SPEC)
    store.close()
    store.close()
    store.cancel(True)
    with pytest.raises(NativeError, match="closed"):
        store.stats()


def test_stock_library_is_named(tmp_path):
    source = tmp_path / "stock.c"
    source.write_text("int llama_nothing(void) { return 0; }\n")
    with pytest.raises(NativeError, match=rf"stock package.*{built.advice()}"):
        Library(shared(source, tmp_path))


def test_another_abi_is_refused(tmp_path):
    with pytest.raises(NativeError, match=f"ABI 99, this Python code needs {ABI_VERSION}"):
        Library(compile_stub(tmp_path, abi=99))


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
def compiled(tmp_path_factory):
    """Sizes, offsets and constants by C expression."""
    wanted = [f"sizeof(struct {name})" for name in STRUCTS]
    for name, mirror in STRUCTS.items():
        wanted += [f"offsetof(struct {name}, {field[0]})" for field in mirror._fields_]
        wanted += [f"sizeof(((struct {name} *) 0)->{field[0]})" for field in mirror._fields_]
    wanted += list(CONSTANTS)
    lines = "".join(f'    printf("%lld\\n", (long long) ({each}));\n' for each in wanted)
    folder = tmp_path_factory.mktemp("abi")
    source, program = folder / "abi.c", folder / "abi"
    source.write_text(f'#include <stdio.h>\n#include "{HEADER}"\nint main(void) {{\n{lines}}}\n')
    compile_c(source, program, "-Werror")
    output = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    return dict(zip(wanted, map(int, output.split()), strict=True))


@pytest.mark.parametrize("name", STRUCTS)
def test_struct(compiled, name):
    mirror = STRUCTS[name]
    assert ctypes.sizeof(mirror) == compiled[f"sizeof(struct {name})"] == abi.STRUCT_BYTES[mirror]
    for field, *_ in mirror._fields_:
        descriptor = getattr(mirror, field)
        assert descriptor.offset == compiled[f"offsetof(struct {name}, {field})"], field
        assert descriptor.size == compiled[f"sizeof(((struct {name} *) 0)->{field})"], field


def test_every_field_is_mirrored():
    text = re.sub(r"//[^\n]*", "", HEADER.read_text())
    for name, mirror in STRUCTS.items():
        match = re.search(rf"struct {name} {{(.*?)\n}};", text, re.DOTALL)
        assert match is not None, name
        fields = re.findall(r"(\w+)(?:\[[^\]]*\])*;", match.group(1))
        assert fields == [field[0] for field in mirror._fields_], name


def test_constants(compiled):
    assert {name: compiled[name] for name in CONSTANTS} == CONSTANTS


def test_every_function_takes_as_many_arguments():
    text = re.sub(r"//[^\n]*", "", HEADER.read_text())
    declared = {}
    for match in re.finditer(r"MOE_EDGE_API[^;]*?(moe_edge_\w+)\((.*?)\);", text, re.DOTALL):
        arguments = re.sub(r"\(\*\w+\)\([^)]*\)", "", match.group(2)).strip()
        declared[match.group(1)] = 0 if arguments == "void" else arguments.count(",") + 1
    mirrored = {name: len(types) for name, (_, types) in abi.FUNCTIONS.items()}
    assert mirrored == {name: declared.get(name) for name in mirrored}


def test_inputs_are_read_only():
    shape = make_shape()
    event, view = make_event(shape, np.random.default_rng(1), n_ahead=1), make_view(shape)
    assert event.importance_array is None
    event.has_importance = 1
    for array in (
        event.ids_array,
        event.weights_array,
        event.tokens_array,
        event.ahead_ids_array,
        event.ahead_array,
        event.importance_array,
        view.resident_array,
    ):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    for flat in (event.ids, event.weights, event.ahead_ids[0], view.resident[0]):
        with pytest.raises(TypeError):
            flat[0] = 0


def test_prefetch_beyond_capacity_is_dropped():
    decision = make_decision(make_shape(), capacity=2)
    for expert in range(5):
        decision.prefetch(0, expert, 0)
    assert [item[1] for item in prefetches(decision)] == [0, 1]
    decision = make_decision(make_shape(), capacity=4)
    decision.prefetch_all(3, [7, 8, 9], 1)
    decision.prefetch_all(4, [1, 2, 3], 0, kinds=6)
    assert prefetches(decision) == [(3, 7, 1, 0), (3, 8, 1, 0), (3, 9, 1, 0), (4, 1, 0, 6)]


def test_stats_are_json():
    unknown = {each.name: math.nan for each in fields(GenerationStats)}
    stats = GenerationStats(**(unknown | {"mix": {"q4_k": 1.0}, "computed": {"q4_k": 1.0}}))
    parsed = json.loads(json.dumps(stats.as_dict(), allow_nan=False))
    assert parsed["tpot_ms_p50"] is None
    assert parsed["mix"]["q4_k"] == parsed["computed"]["q4_k"] == 1.0


def test_percentile():
    assert percentile([1.0, 2.0, 3.0], 50) == 2.0
    assert math.isnan(percentile([], 50))
    random = np.random.default_rng(0)
    for n in (1, 2, 5, 64):
        values = random.random(n) * 1000
        for q in (0, 10, 50, 99, 100):
            assert percentile(values, q) == float(np.percentile(values, q))
