"""What the host takes to compute an expert, as the choice of --misses auto gets it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gguf_tools.experts import ExpertModel
from gguf_tools.file.layout import DOWN, GGMLType
from orchestrator.engine.store_layout import spec_for, store_layers
from orchestrator.memory.footprint import device_shape
from orchestrator.memory.layouts import with_product_times
from orchestrator.native import Library, Misses, ProductTime, StoreSpec, measure_product
from orchestrator.policy import POLICIES

AUTO = Misses("auto", copy=20e9, read=10e9, round_trip_us=10.0, threads=2)


def spec_of(model: ExpertModel, misses: Misses) -> StoreSpec:
    policy = POLICIES["dymoe"](device_shape(model, (0, 1)))
    slots = policy.plan(1 << 22)
    tiers = {"misses": misses, "files": (), "budget_bytes": 1, "max_tokens": 1, "n_io_threads": 1}
    layers = store_layers(model.layer_ids, model.slices, (0, 1), slots)
    return spec_for(policy, slots, layers, **tiers)


def test_each_type_and_shape_is_timed_once(tiny_model: Callable[..., Path]) -> None:
    asked: list[tuple[int, tuple[int, int]]] = []

    def timed(quant: int, shape: tuple[int, int]) -> ProductTime | None:
        asked.append((quant, shape))
        return None if quant == GGMLType.Q2_K else ProductTime(shape[0] / 100, len(asked))

    with ExpertModel.open(tiny_model("qwen3moe", "q4_k", "q2_k")) as model:
        spec = with_product_times(spec_of(model, AUTO), model, timed)
        shapes = model.shapes
    assert sorted(asked) == sorted(set(asked))
    assert {quant for quant, _ in asked} == {GGMLType.Q4_K, GGMLType.Q2_K}
    for layer, (_, slices) in enumerate(spec.layers):
        for (kind, tier), piece in slices.items():
            shape = shapes[layer][kind]
            assert piece.compute_us == (0 if tier else shape[0] / 100)
    # gate and up begin together, down behind them: each waits for the threads to wake
    waking = max(at + 1 for at, (quant, _) in enumerate(asked) if quant == GGMLType.Q4_K)
    assert spec.misses.round_trip_us == 10.0 + waking
    assert {kind for _, slices in spec.layers for kind, _ in slices} >= {DOWN}


@pytest.mark.parametrize("misses", [Misses("copy", copy=1.0), Misses("auto")])
def test_nothing_is_timed_where_nobody_asks(
    tiny_model: Callable[..., Path], misses: Misses
) -> None:
    with ExpertModel.open(tiny_model("qwen3moe", "q4_k", "q2_k")) as model:
        spec = spec_of(model, misses)
        assert with_product_times(spec, model, lambda *_: pytest.fail("it was timed")) is spec


def test_real_products_are_timed(library: Library) -> None:
    """A larger one takes longer, in any type; threads that sleep take time to wake."""
    for quant in (GGMLType.Q4_K, GGMLType.Q2_K, GGMLType.Q8_0, GGMLType.F16):
        # Each several times: a machine may stand still while one is timed.
        small, large = (
            [measure_product(library, quant, shape, 1) for _ in range(3)]
            for shape in ((256, 64), (2048, 2048))
        )
        found = [each for each in small + large if each is not None]
        assert len(found) == 6 and all(each.wake_us >= 0 for each in found)
        assert 0 < min(each.each_us for each in found[:3]) < min(each.each_us for each in found[3:])
    for quant, shape in ((GGMLType.Q4_K, (100, 8)), (-1, (256, 8)), (GGMLType.Q8_1, (256, 8))):
        assert measure_product(library, quant, shape, 1) is None
    assert measure_product(library, GGMLType.Q4_K, (256, 8), 0) is None
