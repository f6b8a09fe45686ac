"""Store over a stub library in C: views, callback, exceptions, life time."""

from __future__ import annotations

import ctypes
import dataclasses
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gguf_tools import built
from orchestrator.errors import NativeError
from orchestrator.events import Phase, RouteEvent
from orchestrator.native import ABI_VERSION, Library, Slices, Store, StoreSpec

HERE = Path(__file__).resolve().parent
HEADER = HERE.parents[2] / "patches" / "native" / "moe-edge.h"


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


def test_exception_in_progress_stops_the_warming(store: Store) -> None:
    def progress(_share: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.warm([(0, 0, 0), (0, 1, 0), (0, 2, 0)], progress)
    assert not seen(store, CANCELLED)
    assert store.warm([(0, 0, 0)]) == 1


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
    with pytest.raises(NativeError, match=rf"stock package.*{built.advice()}"):
        Library(ctypes.CDLL(str(target)))


def test_another_abi_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NativeError, match=f"ABI 99, this Python code needs {ABI_VERSION}"):
        Library(compile_stub(tmp_path, abi=99))
