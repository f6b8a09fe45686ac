"""The GPU benchmark: its cases, ratios and table, with a real run on the host device."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from made_runs import part, rows_of, run

from gguf_tools import synthetic
from gguf_tools.experts import ExpertModel
from gguf_tools.file.layout import UP
from orchestrator.cost import losses
from orchestrator.errors import ConfigError
from orchestrator.lab.bench import table3
from orchestrator.lab.bench.cases import ON_DEMAND, PAPER, Case
from orchestrator.lab.bench.gpu import (
    BANDWIDTH,
    MANAGED_ON_GPU,
    UPSTREAM,
    UPSTREAM_CPU,
    UPSTREAM_ON_GPU,
    FixedMemory,
    Gpu,
    GpuOptions,
    nearest_times,
)
from orchestrator.runtime.load import SPARE_BYTES

MIB, GIB = 2**20, 2**30
FIXED = FixedMemory(ours=2 * GIB, theirs=GIB, layers=(GIB,) * 8)


def test_upstream_keeps_layers_that_do_not_fit_on_the_cpu():
    """Upstream needs 1 GiB less itself, so it may keep one layer more on the GPU."""
    assert [FIXED.vram_bytes(share) for share in (0.25, 0.5)] == [4 * GIB, 6 * GIB]
    assert [FIXED.cpu_moe(share) for share in (0.01, 0.25, 0.5, 0.99)] == [7, 5, 3, 0]
    larger = FixedMemory(ours=GIB, theirs=3 * GIB, layers=(GIB,) * 8)
    assert (larger.vram_bytes(0.1), larger.cpu_moe(0.1)) == (3 * GIB + int(0.8 * GIB), 8)


@pytest.mark.parametrize("kernels", [0, 300 * MIB])
def test_memory_of_kernels_is_not_taken_from_experts(monkeypatch, tmp_path, kernels):
    """Memory of kernels is measured for both engines and does not reduce the experts' share.

    Our plan never uses less than its estimate, so the estimate counts if kernels need less.
    """
    options = GpuOptions(caps=(0.25, 0.5), prompt_tokens=8)
    pieces = [SimpleNamespace(expert_bytes=GIB // 8)]
    model = SimpleNamespace(n_layers=4, n_expert=8, tier_bytes=(4 * GIB,), slices=[[pieces]] * 4)
    loop = Gpu()
    loop.on, loop.model, loop.note = options, model, lambda text: None
    loop.high = tmp_path / "model.gguf"
    asked = []

    def measure(case, _number):
        asked.append(case.settings)
        if case.system == "engine":
            slots = case.settings["expert_ram"]
            memory = {"fixed": 600 * MIB, "planned": 600 * MIB + slots}
            return {"memory": memory | {"used": 500 * MIB + slots + kernels}}
        on_gpu = (model.n_layers - case.settings["cpu_moe"]) * GIB
        return {"memory": {"llama": 400 * MIB + on_gpu, "used": 450 * MIB + on_gpu + kernels}}

    monkeypatch.setattr(loop, "measure", measure)
    loop.measure_fixed_memory(1)
    ours = 500 if kernels else 600
    assert loop.fixed_memory.ours == ours * MIB + kernels + SPARE_BYTES
    assert loop.fixed_memory.theirs == 450 * MIB + kernels + SPARE_BYTES
    assert loop.fixed_memory.vram_bytes(0.5) == loop.fixed_memory.ours + 2 * GIB
    assert asked[0]["low_tier"] and asked[0]["prefetch"] == "on" and asked[1]["gpu"] == 1


def read_expert(model, layer):
    """The bytes of the first expert's up matrix in the best precision."""
    number, offset, n_bytes, _ = model.slices[layer][UP][0]
    return model.files[number].read_bytes()[offset : offset + n_bytes]


def row(name, cap, role, tpot, ttft):
    times = {"tpot_ms_p50_runs": tpot, "ttft_ms_runs": ttft}
    return {"name": name, "cap": cap, "role": role} | times


def compare(rows, runs, copies, reads):
    made = Gpu()
    made.copies, made.bandwidths = copies, [SimpleNamespace(bytes_per_s=each) for each in reads]
    made.compare(rows, runs)


def test_ratios_are_against_the_better_upstream_of_each_run():
    rows = [
        row(UPSTREAM_ON_GPU, None, "upstream", [2.0, 2.0], [10.0, 10.0]),
        row(MANAGED_ON_GPU, None, "reference", [2.5, 4.0], [20.0, 10.0]),
        row(UPSTREAM, 0.5, "upstream", [8.0, 12.0], [100.0, 100.0]),
        row(UPSTREAM_CPU, 0.5, "upstream", [9.0, 10.0], [90.0, 200.0]),
        row("lru", 0.5, "", [4.0, 2.0], [45.0, 50.0]),
        row(ON_DEMAND, 0.5, "", [8.0, 8.0], [45.0, 50.0]),
    ]
    compare(rows, [[]] * 6, [{"pinned": 1, "pageable": 1}] * 2, [1e9] * 2)
    assert (rows[1]["speedup"], rows[1]["ttft_speedup"]) == (0.65, 0.75)
    assert (rows[4]["speedup"], rows[4]["ttft_speedup"]) == (3.5, 2.0)
    assert (rows[3]["speedup"], rows[4]["speedup_tpot"]) == ((8 / 9 + 1.0) / 2, 3.0)


def measured(**store):
    """A run of four tokens that took 8 ms each."""
    four = {key: 4 * value for key, value in store.items()}
    made = run(part("prompt", [500.0], 100, copied_bytes=9e9), part("decode", [8.0] * 4, **four))
    return made | {"memory": {"used": 5 * MIB}}


@pytest.mark.parametrize(
    ("cap", "store", "bound", "by"),
    [
        (0.5, {"needed_copied_bytes": 40e6}, 4.0, "misses"),
        (0.5, {"needed_copied_bytes": 10e6}, 2.0, "computing"),
        (0.5, {"needed_copied_bytes": 10e6, "needed_bytes": 20e6}, 20.0, "misses"),
        (0.5, {"needed_copied_bytes": 10e6, "host_computed_bytes": 30e6}, 6.0, "misses"),
        (None, {"needed_copied_bytes": 40e6}, None, None),
    ],
)
def test_the_bound_is_the_slower_of_computing_and_misses(cap, store, bound, by):
    runs = [measured(**store)]
    made = Gpu()
    made.fixed_memory = SimpleNamespace(vram_bytes=lambda share: 4 * MIB)
    made.model = SimpleNamespace(n_layers=2)
    rows = [
        row(MANAGED_ON_GPU, None, "reference", [2.0], [100.0]),
        made.row(Case("lru", "engine", cap), runs),
    ]
    speeds = {"pinned": 10e9, "pageable": 2e9, "compute": 5e9}
    compare(rows, [[], runs], [speeds], [1e9])
    assert (rows[1].get("bound_tpot_ms"), rows[1].get("bound_by")) == (bound, by)
    assert rows[1].get("of_bound") == (bound and bound / 8.0)
    assert cap is None or "OVER the memory cap of 4" in made.notes(rows[1:])[0]


@pytest.mark.parametrize(
    ("own", "wanted", "times"),
    [(48e9, 12e9, 4), (51e9, 12e9, 4), (12.5e9, 12e9, 1), (9e9, 12e9, 1)],
)
def test_the_number_of_copies_that_is_nearest_to_a_link(own, wanted, times):
    assert nearest_times(own, wanted) == times


def test_options_of_the_paper_s_table():
    """The given options win, and the longer prompt has four times the tokens of the shorter one."""
    found = GpuOptions.of({"table3": True, "caps": (0.5,), "layers": None, "link": 12 * 10**9})
    assert (found.layers, found.shape, found.caps, found.runs) == (48, "qwen3-30b", (0.5,), 1)
    assert [each.n for each in found.parts() if each.kind == "prompt"] == [512, 512, 2048]
    assert found.n_ubatch == 2048 and found.same_layers
    assert GpuOptions.of({"table3": True, "quick": True}).layers is None
    assert BANDWIDTH.read("12GB/s") == 12 * 10**9 and BANDWIDTH.write(12 * 10**9) == "12GB/s"
    with pytest.raises(ConfigError, match="--predict needs"):
        GpuOptions.of({"predict": True})


def test_rows_of_the_paper_s_table():
    """All rows up to a quarter of the experts, and above it those without 4/2 alone."""
    few = [case.name for case in table3.cases_under(0.5, False, 0.75, Path("t"))]
    assert few == list(table3.FEW)
    first = [case.name for case in table3.cases_under(0.5, True, 0.75, Path("t"))]
    assert first == [ON_DEMAND, *table3.FEW]
    every = [case.name for case in table3.cases_under(0.25, True, 0.75, Path("t"))]
    assert every == [*PAPER, "dynaexq 4/2", table3.FLOOR]


def test_a_stretched_loss_table_belongs_to_its_model(tmp_path):
    shape = replace(synthetic.preset("tiny-qwen3moe"), n_expert=24, n_layer=5)
    path = synthetic.write(tmp_path / "m.gguf", shape, same_layers=True)
    with ExpertModel.open(path) as model:
        table = losses.load(table3.write_losses(tmp_path / "losses.json", path), model)
        slices = [read_expert(model, layer) for layer in (0, 4)]
    assert table.loss.shape == (5, 24, 3) and table.estimate(["q4_k", "q2_k"]) is not None
    assert slices[0] == slices[1]


def test_without_a_gpu_there_is_one_sentence():
    with pytest.raises(ConfigError, match="--device cuda63"):
        Gpu().run(GpuOptions(device="cuda63"))


def test_every_case_runs_on_the_host_device(real_engine, tmp_path):
    options = GpuOptions(
        quick=True,
        device="host",
        caps=(0.6,),
        tokens=8,
        warmup=1,
        prompt_tokens=16,
        runs=1,
        layers=2,
        keep=tmp_path,
    )
    report = Gpu().run(options)
    rows = rows_of(report)
    assert not [case for case in report.rows if "error" in case]
    assert rows[MANAGED_ON_GPU, None]["hit_rate"] == 1
    assert 0 < rows["lru", 0.6]["hit_rate"] < 1
    assert rows["dynaexq 4/2", 0.6]["mix"]["low"] > 0
    assert rows[ON_DEMAND, 0.6]["hit_rate"] == 0
    assert all(rows[name, 0.6]["bound_tpot_ms"] > 0 for name in ("lru", *PAPER))
    assert max(map(len, report.text().splitlines())) <= 100
    # A second call reuses the stored results.
    kept = set(tmp_path.glob("case-*.json"))
    again = Gpu().run(options)
    assert rows_of(again)["lru", 0.6]["tpot_ms_p50"] == rows["lru", 0.6]["tpot_ms_p50"]
    assert len(kept) == 2 + len(report.rows) and set(tmp_path.glob("case-*.json")) == kept
