"""The native interface: ctypes mirrors of moe-edge.h compared with a C compiler, errors of a store,
and views of native memory."""

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
from tables import cases

from gguf_tools import built
from orchestrator import events
from orchestrator.config import Config
from orchestrator.errors import NativeError
from orchestrator.events import GenerationStats, percentile
from orchestrator.native import ABI_VERSION, Library, Store, abi
from orchestrator.runtime.runtime import Runtime

HEADER = Path(__file__).resolve().parents[3] / "patches" / "native" / "moe-edge.h"


def compile_c(source, target, *flags):
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler (cc, gcc or clang)")
    subprocess.run([compiler, *flags, "-o", target, source], check=True)


@pytest.fixture
def runtime(library, tiny_model):
    """A model with a store of few slots."""
    model = tiny_model("qwen3moe", "q8_0", "q4_k")
    usual = {"policy": "lru", "expert_ram": 2**20, "ctx": 256, "ubatch": 8, "threads": 1}
    with Runtime.open(Config.build(model=model, **usual)) as opened:
        yield opened


@pytest.fixture
def e(runtime):
    with runtime.evaluator() as evaluator:
        yield evaluator


@cases("error", KeyError("odd"), KeyboardInterrupt(), SystemExit(3))
def test_exception_in_the_route_is_raised_by_the_step(e, error):
    def route(_event):
        raise error

    e.inside.store.set_route(route)
    with pytest.raises(type(error)) as caught:
        e.eval([4, 5], 0)
    assert caught.value is error
    e.inside.store.set_route(None)
    e.eval([4, 5], 0)


def test_callbacks_are_counted_and_timed(e):
    store = e.inside.store
    assert store.callback_us() is None
    store.set_route(lambda event: None)
    e.eval([4, 5], 0)
    assert store.calls == e.inside.model.n_layers and store.callback_us() > 0
    assert store.callback_us(store.calls) is None


def test_native_reason_is_raised(e):
    e.inside.store._on_route = lambda _user: 1
    e.inside.store.set_route(lambda event: None)
    with pytest.raises(NativeError, match="the route callback failed"):
        e.eval([4, 5], 0)


def test_creation_refused_with_a_reason(e):
    few = dataclasses.replace(e.inside.store.spec, budget_bytes=1)
    with pytest.raises(NativeError, match="budget"):
        Store.create(e.inside.store.library, few)


def test_exception_in_progress_stops_the_warming(e):
    def progress(_share):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        e.inside.store.warm([(0, 0, 0), (0, 1, 0), (0, 2, 0)], progress)
    assert e.inside.store.warm([(0, 3, 0)]) == 1  # the store is no longer cancelled


def test_a_closed_store_raises_an_error(runtime):
    store = runtime.inside.store
    runtime.close()
    store.close()
    store.cancel(True)
    with pytest.raises(NativeError, match="closed"):
        store.stats()


@cases(
    "source, said",
    ("int llama_nothing(void) { return 0; }", rf"stock package.*{built.advice()}"),
    (
        "int moe_edge_abi_version(void) { return 99; }",
        f"ABI 99, but this Python code needs {ABI_VERSION}",
    ),
)
def test_another_library_is_refused(tmp_path, source, said):
    (tmp_path / "lib.c").write_text(source + "\n")
    compile_c(tmp_path / "lib.c", tmp_path / "lib.so", "-shared", "-fPIC")
    with pytest.raises(NativeError, match=said):
        Library(ctypes.CDLL(str(tmp_path / "lib.so")))


NAMES = "slices group layer config event step prefetch_item decision stats touched room".split()
STRUCTS = {f"moe_edge_{name}": getattr(abi, f"C{name.split('_')[0].title()}") for name in NAMES}
CONSTANTS = {
    **{name: getattr(events, name) for name in ("MAX_PREFETCH", "SKIP", "ABSENT")},
    **{name: getattr(abi, name) for name in ("ABI_VERSION", "MAX_TIERS", "MAX_AHEAD", "N_KINDS")},
    **{name: getattr(abi, name) for name in ("DIRECT_IO", "SIMULATED", "FAILED")},
    **{name: int(events.Phase[name]) for name in ("PREFILL", "DECODE")},
}
CONSTANTS = {f"MOE_EDGE_{name}": value for name, value in CONSTANTS.items()}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Values of sizes, offsets and constants, by C expression."""
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
def test_structs_have_the_sizes_and_offsets_of_the_header(compiled, name):
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


def test_constants_equal_those_of_the_header(compiled):
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
