"""`moe-edge bench gpu` with its processes. On the emulated GPU only some cases run."""

import os
from dataclasses import replace

import pytest

from orchestrator.lab.bench import gpu
from orchestrator.lab.bench.cases import MIXED_AHEAD

from .conftest import HERE

CASES = {gpu.MANAGED_ON_GPU, MIXED_AHEAD}


@pytest.mark.parametrize("kernels", [0, 4 << 20])
def test_bench(device, monkeypatch, kernels):
    """All cases stay within their VRAM limit. Times are not checked.

    kernels: memory of each kernel on the emulated GPU. At 4 MiB, one kernel takes more than all
    experts.
    """
    if kernels and not device.emulated:
        pytest.skip("only the emulated GPU has kernels of a chosen size")
    if device.emulated:
        monkeypatch.setenv("MOE_EMU_MODULE", str(kernels))
        path = [str(HERE / "site"), os.environ.get("PYTHONPATH", "")]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
        monkeypatch.setenv("MOE_EDGE_TEST_BACKEND", str(device.library))

    def few(benchmark):
        listed = every(benchmark)
        chosen = [case for case in listed if case.name in CASES or gpu.UPSTREAM in case.name]
        # The cap would hold all experts of this small model.
        tight = {"expert_ram": 1 << 19}
        chosen = [
            replace(case, settings=case.settings | tight) if case.name == MIXED_AHEAD else case
            for case in chosen
        ]
        return chosen if device.emulated else listed

    every = gpu.Gpu.cases
    monkeypatch.setattr(gpu.Gpu, "cases", few)
    options = gpu.GpuOptions(
        quick=True, caps=(0.5,), tokens=2, warmup=1, prompt_tokens=8, runs=1, threads=1, layers=2
    )
    report = gpu.Gpu().run(options)
    rows = {row["name"]: row for row in report.rows}
    assert not [row for row in rows.values() if "error" in row]
    assert (
        rows[gpu.MANAGED_ON_GPU]["hit_rate"] == 1
    )  # counted on the GPU, because these steps have no hook
    assert rows[gpu.MANAGED_ON_GPU]["mix"]["high"] == 1
    assert rows[MIXED_AHEAD]["copied_bytes_per_token"] > 0
    assert all(row["peak_bytes"] > 0 for row in rows.values())
    assert not any(row["peak_bytes"] > (row["limit_bytes"] or 1 << 50) for row in rows.values())
    text = report.text()
    assert "from pinned memory" in text and "of bound" in text and "OVER" not in text
