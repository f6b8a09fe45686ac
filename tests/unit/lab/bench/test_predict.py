"""Predictions of Table 3 by replay: the drawn routing, and the rows at two link speeds."""

from dataclasses import replace

import numpy as np
import pytest

from gguf_tools import synthetic
from gguf_tools.synthetic.weights import zipf_usage
from orchestrator.events import Phase
from orchestrator.lab.bench import predict
from orchestrator.lab.bench.cases import CACHE, CACHE_AHEAD, ON_DEMAND, SKIP_AHEAD
from orchestrator.lab.bench.gpu import Gpu, GpuOptions
from orchestrator.lab.bench.table3 import FLOOR
from orchestrator.lab.replay.file import read_trace, write_trace

SHAPE = replace(synthetic.preset("qwen3-30b"), n_expert=16, n_expert_used=4)


def test_drawn_routing_has_the_usage_and_the_predictions_of_the_model(tmp_path):
    run = predict.Run(3, [(Phase.PREFILL, 2000, 1), (Phase.DECODE, 1, 2)])
    trace = predict.draw_trace(SHAPE, run)
    (prompt, *_) = trace.steps()
    for event in prompt.events:
        used = np.sort(np.bincount(event.ids.ravel(), minlength=16) / 2000)[::-1]
        assert np.abs(used - zipf_usage(16, 4, 1.0)).max() < 0.05
        assert np.allclose(event.weights.sum(axis=1), 1, atol=1e-5)
    first, second, last = prompt.events
    shared = (first.ahead_ids[0][:, :, None] == second.ids[:, None, :]).any(axis=1).mean()
    assert 0.8 < shared < 1.0
    assert len(last.ahead_ids) == 0
    write_trace(tmp_path / "t.npz", trace)
    assert read_trace(tmp_path / "t.npz").lengths() == trace.lengths()


def rows_at(link):
    options = {"table3": True, "predict": True, "link": link, "layers": 3, "caps": (0.25,)}
    few = {"tokens": 32, "prompt_tokens": 32}
    report = Gpu().run(GpuOptions.of(options | few))
    assert "These speeds are simulated, not measured" in report.text()
    return {row["name"]: row for row in report.rows}


def test_a_faster_link_gives_faster_rows(library):
    slow, fast = rows_at(3 * 10**9), rows_at(48 * 10**9)
    assert all(fast[name]["tpot_ms_p50"] < row["tpot_ms_p50"] for name, row in slow.items())
    # A token of row 1 copies all its experts: 3 layers, 8 experts of 2.65 MB each.
    every = 3 * 8 * 3 * 2048 * 768 * 4.5 / 8
    assert slow[ON_DEMAND]["copied_bytes_per_token"] == every
    computing_ms = 3 * predict.DECODE_US / 1000
    link_ms = 1000 * every / 3e9
    assert link_ms < slow[ON_DEMAND]["tpot_ms_p50"] <= link_ms + computing_ms
    assert fast[CACHE_AHEAD]["hit_rate"] > fast[CACHE]["hit_rate"] > 0.4
    assert slow[SKIP_AHEAD]["speedup_tpot"] > slow[CACHE]["speedup_tpot"] > 1
    assert slow[FLOOR]["as_h200_ms"] is None
    assert slow[CACHE]["as_h200_ms"] == pytest.approx(
        slow[CACHE]["tpot_ms_p50"] + fast[CACHE]["as_h200_ms"] - fast[CACHE]["tpot_ms_p50"]
    )
