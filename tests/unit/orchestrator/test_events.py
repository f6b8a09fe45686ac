"""Views of native memory: same bytes, read-only where they are inputs."""

from __future__ import annotations

import json
import math
from dataclasses import fields

import numpy as np
import pytest
from shapes import make_decision, make_event, make_shape, make_view, prefetches

from orchestrator.events import GenerationStats, percentile


def test_inputs_are_read_only() -> None:
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


def test_prefetch_beyond_capacity_is_dropped() -> None:
    decision = make_decision(make_shape(), capacity=2)
    for expert in range(5):
        decision.prefetch(0, expert, 0)
    assert [item[1] for item in prefetches(decision)] == [0, 1]
    decision = make_decision(make_shape(), capacity=4)
    decision.prefetch_all(3, [7, 8, 9], 1)
    decision.prefetch_all(4, [1, 2, 3], 0, kinds=6)
    assert prefetches(decision) == [(3, 7, 1, 0), (3, 8, 1, 0), (3, 9, 1, 0), (4, 1, 0, 6)]


def test_stats_are_json() -> None:
    unknown = {each.name: math.nan for each in fields(GenerationStats)}
    stats = GenerationStats(**(unknown | {"mix": {"q4_k": 1.0}, "computed": {"q4_k": 1.0}}))
    parsed = json.loads(json.dumps(stats.as_dict(), allow_nan=False))
    assert parsed["tpot_ms_p50"] is None
    assert parsed["mix"]["q4_k"] == parsed["computed"]["q4_k"] == 1.0


def test_percentile() -> None:
    assert percentile([1.0, 2.0, 3.0], 50) == 2.0
    assert math.isnan(percentile([], 50))
    random = np.random.default_rng(0)
    for n in (1, 2, 5, 64):
        values = random.random(n) * 1000
        for q in (0, 10, 50, 99, 100):
            assert percentile(values, q) == float(np.percentile(values, q))
