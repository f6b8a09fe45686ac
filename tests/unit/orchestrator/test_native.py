"""Store over a stub library in C: views, callback, exceptions, life time."""

from __future__ import annotations

import ctypes
import dataclasses
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import numpy as np
import pytest

from orchestrator.errors import NativeError
from orchestrator.events import ComputedStep, Phase, RouteEvent
from orchestrator.native import ABI_VERSION, Library, Slices, Store, StoreSpec

HERE = Path(__file__).resolve().parent
HEADER = HERE.parents[2] / "patches" / "native" / "moe-edge.h"
SLEEP_US = 2000  # in a callback


def compile_stub(folder: Path, *extra: str, abi: int = ABI_VERSION) -> ctypes.CDLL:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler (cc, gcc or clang)")
    target = folder / "libstub.so"
    flags = ["-shared", "-fPIC", f'-DSTUB_HEADER="{HEADER}"', f"-DSTUB_ABI={abi}", *extra]
    source = str(HERE / "stub_store.c")
    subprocess.run([compiler, *flags, "-o", str(target), source], check=True)
    return ctypes.CDLL(str(target))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
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
def store(library: Library) -> Iterator[Store]:
    with Store.create(library, SPEC) as made:
        yield made
    library.lib.stub_live.restype = ctypes.c_int
    assert library.lib.stub_live() == 0


def step(store: Store, layer: int, phase: Phase = Phase.DECODE) -> int:
    store.begin_step(phase)
    return int(store.library.lib.stub_step(ctypes.c_void_p(store.handle), layer))


PREFETCHES, RENORMALIZE, CANCELLED, PHASE, ENDED, CALLBACK_PHASES = range(6)


def seen(store: Store, what: int) -> int:
    """What the stub was told last."""
    return int(store.library.lib.stub_seen(ctypes.c_void_p(store.handle), what))


def test_event_reaches_the_route(store: Store) -> None:
    events: list[tuple[Any, ...]] = []

    def route(event: RouteEvent) -> None:
        events.append(
            (
                event.layer,
                event.phase,
                event.step,
                event.n_ahead,
                event.ids_array.tolist(),
                event.weights_array.ravel().tolist(),
                event.phases_array.tolist(),
                event.sequences_array.tolist(),
            )
        )
        sleep(SLEEP_US / 1e6)
        store.decision.tier[1] = 3
        store.decision.prefetch(1, 2, 0)
        store.decision.renormalize = True
        store.apply(store.decision)

    store.set_route(route)
    begin_s = perf_counter()
    assert step(store, 0, Phase.PREFILL) == 0
    assert (seen(store, PREFETCHES), seen(store, RENORMALIZE)) == (1, 1)
    assert step(store, 1) == 0
    store.check_step()
    weights = [0.25, 0.5, 0.75, 1.0]
    assert events == [
        (0, Phase.PREFILL, 1, 1, [[0, 1], [3, 0]], weights, [1, 0], [0, 3]),
        (1, Phase.DECODE, 2, 0, [[2, 3], [3, 0]], weights, [1, 0], [1, 4]),
    ]
    assert store.decision.tier.tolist() == [0, 3, 0, 0]
    assert store.calls == 2
    assert SLEEP_US <= (store.callback_us() or 0) <= 1e6 * (perf_counter() - begin_s)
    assert store.callback_us(since=2) is None


@pytest.mark.parametrize("error", [KeyError("odd"), KeyboardInterrupt(), SystemExit(3)])
def test_exception_in_the_route_is_raised_by_the_step(store: Store, error: BaseException) -> None:
    def route(_event: RouteEvent) -> None:
        raise error

    store.set_route(route)
    assert step(store, 0) == 1
    with pytest.raises(type(error)) as caught:
        store.check_step()
    assert caught.value is error
    store.set_route(None)
    assert step(store, 0) == 0
    store.check_step()


def test_native_reason_is_raised(store: Store) -> None:
    store.set_route(lambda event: None)
    step(store, 0)
    store._on_route = lambda _user: 1  # type: ignore[method-assign]
    store.set_route(lambda event: None)
    assert step(store, 0) == 1
    with pytest.raises(NativeError, match="the route callback failed"):
        store.check_step()


def test_creation_refused_with_a_reason(library: Library) -> None:
    with pytest.raises(NativeError, match="not the stub's"):
        Store.create(library, dataclasses.replace(SPEC, groups=((4096, 3), (8192, 4))))


def test_a_step_is_reported(store: Store) -> None:
    steps: list[ComputedStep] = []
    store.set_step_done(steps.append)
    store.begin_step(Phase.PREFILL)
    end_step = store.library.lib.stub_end_step
    assert end_step(ctypes.c_void_p(store.handle)) == 0
    assert steps == [ComputedStep(1, Phase.PREFILL, 7, 1500.0, (3, 5), (), (2,))]

    error = KeyError("odd")

    def fail(_step: ComputedStep) -> None:
        raise error

    store.set_step_done(fail)
    assert end_step(ctypes.c_void_p(store.handle)) == 1
    with pytest.raises(KeyError) as caught:
        store.check_step()
    assert caught.value is error
    store.set_step_done(None)
    assert end_step(ctypes.c_void_p(store.handle)) == 0
    assert len(steps) == 1


def test_what_the_front_end_says(store: Store) -> None:
    for phase, said in ((Phase.PREFILL, 0), (Phase.DECODE, 1), (None, -1)):
        store.set_phase(phase)
        assert seen(store, PHASE) == said
    for sequence, name in ((4, 4), (None, -1)):
        store.sequence_end(sequence)
        assert seen(store, ENDED) == name
    store.set_route(lambda event: None)
    assert seen(store, CALLBACK_PHASES) == 0b11
    store.set_route(lambda event: None, 1, (Phase.PREFILL,))
    assert seen(store, CALLBACK_PHASES) == 0b01


def test_check_raises_the_reason(store: Store) -> None:
    store.check()
    for _ in range(101):
        store.begin_step(Phase.DECODE)
    with pytest.raises(NativeError, match="101 steps"):
        store.check()


def test_warm_loads_and_reports(store: Store) -> None:
    shares: list[float] = []
    assert store.warm([(0, 1, 0), (1, 3, 0)], shares.append) == 2
    assert shares == [0.5, 1.0]
    assert store.warm([]) == 0


def test_exception_in_progress_stops_the_warming(store: Store) -> None:
    def progress(_share: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.warm([(0, 0, 0), (0, 1, 0), (0, 2, 0)], progress)
    assert not seen(store, CANCELLED)
    assert store.warm([(0, 0, 0)]) == 1


def test_transitions_states_and_counts(store: Store) -> None:
    store.warm([(layer, expert, 1) for layer in (0, 1) for expert in range(4)])
    assert store.transition([(1, 2, 0)]) == 1
    assert store.transition([]) == 0
    resident, target = store.states()
    assert resident.tolist() == [[1, 1, 1, 1], [1, 1, 1, 1]]
    assert target.tolist() == [[1, 1, 1, 1], [1, 1, 0, 1]]
    assert np.argwhere(store.landed()).tolist() == [[1, 2]]
    with pytest.raises(NativeError, match="does not have"):
        store.transition([(0, 4, 0)])
    store.set_transition_rate(1 << 40)
    step(store, 1)
    assert all(state.tolist() == target.tolist() for state in store.states())
    assert store.take_counts().tolist() == [[0, 0, 0, 0], [1, 0, 1, 2]]
    assert not store.take_counts().any()


def test_cancel_and_stats(store: Store) -> None:
    assert not seen(store, CANCELLED)
    store.cancel(True)
    assert seen(store, CANCELLED)
    store.cancel(False)
    assert not seen(store, CANCELLED)
    step(store, 0)
    assert store.stats().callbacks[Phase.DECODE] == 1
    store.reset_stats()
    assert store.stats().callbacks[Phase.DECODE] == 0


def test_a_limit_that_is_refused(store: Store) -> None:
    with pytest.raises(NativeError, match="the stub has no slots"):
        store.limit(1)


def test_closed_store_says_so(library: Library) -> None:
    store = Store.create(library, SPEC)
    store.close()
    store.close()
    store.cancel(True)
    with pytest.raises(NativeError, match="closed"):
        store.stats()


def test_stock_library_is_named(tmp_path: Path) -> None:
    source = tmp_path / "stock.c"
    source.write_text("int llama_nothing(void) { return 0; }\n")
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler (cc, gcc or clang)")
    target = tmp_path / "libstock.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(target), str(source)], check=True)
    with pytest.raises(NativeError, match=r"stock package.*make build"):
        Library(ctypes.CDLL(str(target)))


def test_another_abi_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NativeError, match=f"ABI 99, this Python code needs {ABI_VERSION}"):
        Library(compile_stub(tmp_path, abi=99))
