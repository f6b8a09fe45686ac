"""`moe-edge bench gpu --table3` with a slower link, on the emulated GPU."""

import os

from orchestrator.lab.bench import gpu
from orchestrator.lab.bench.cases import CACHE_AHEAD, MIXED_AHEAD, ON_DEMAND, SKIP_AHEAD
from orchestrator.lab.bench.table3 import FLOOR

from .conftest import HERE


def test_rows_of_the_paper(device, emulated, monkeypatch, tmp_path):
    """Rows are printed as they end. With a slower link, upstream has no row."""
    path = [str(HERE / "site"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    monkeypatch.setenv("MOE_EDGE_TEST_BACKEND", str(device.library))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(gpu, "nearest_times", lambda own, wanted: 3)
    names = (ON_DEMAND, CACHE_AHEAD, MIXED_AHEAD, SKIP_AHEAD, FLOOR)
    options = gpu.GpuOptions.of(
        {
            "table3": True,
            "quick": True,
            "link": 10**9,
            "caps": (0.25, 0.5),
            "tokens": 2,
            "warmup": 1,
            "prompt_tokens": 4,
            "threads": 1,
            "rows": names,
        }
    )
    notes: list[str] = []
    report = gpu.Gpu().run(options, notes.append)
    rows = {(row["name"], row["cap"]): row for row in report.rows}
    assert not [row for row in rows.values() if "error" in row]
    assert {name for name, cap in rows if cap == 0.25} == set(names)
    assert {name for name, cap in rows if cap == 0.5} == {CACHE_AHEAD, MIXED_AHEAD, SKIP_AHEAD}
    assert all(row["speedup_tpot"] > 0 and row["long_ms"] > 0 for row in rows.values())
    assert any("copied 3 times" in note for note in notes)
    assert sum(
        "Time that decoding waited, in us per layer and token" in note for note in notes
    ) == len(rows)
    text = report.text()
    assert "each expert is copied 3 times" in text and "2.43/3.71" in text
