"""Uniform types that fit a cap as a whole, the rows that are asked for, and room on the disk."""

import shutil
from types import SimpleNamespace

import pytest

from gguf_tools import synthetic
from gguf_tools.experts import ExpertModel
from orchestrator.errors import ConfigError, MoeEdgeError
from orchestrator.lab.bench import models
from orchestrator.lab.bench.benchmark import only
from orchestrator.lab.bench.caps import Caps, cap_cases, largest_whole
from orchestrator.lab.bench.models import UNIFORM, tier_expert_bytes
from orchestrator.lab.bench.options import BenchOptions


@pytest.fixture
def loop(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return Caps().prepare(BenchOptions(quick=True), lambda text: None)


def test_bytes_of_a_type_are_those_of_its_file(tmp_path, loop):
    for tier in ("q2_k", "q8_0", "q6_k"):
        path = synthetic.write(tmp_path / f"{tier}.gguf", "tiny-olmoe", tiers=(tier,))
        assert tier_expert_bytes(loop.model, tier) == ExpertModel.open(path).tier_bytes[0]


def test_the_largest_type_that_fits_is_taken(loop):
    experts = loop.model.tier_bytes[0]
    sizes = {tier: tier_expert_bytes(loop.model, tier) for tier in UNIFORM}
    assert list(sizes.values()) == sorted(sizes.values(), reverse=True)
    for tier in ("iq4_xs", "q3_k", "iq2_xxs"):
        assert largest_whole(loop, (sizes[tier] + 0.5) / experts) == tier
        assert largest_whole(loop, (sizes[tier] - 0.5) / experts) != tier
    assert largest_whole(loop, 0.1) is None


def test_the_whole_process_counts_where_it_is_capped(loop):
    loop.options = SimpleNamespace(
        caps_process=True, n_ctx=256, n_ubatch=16, trained=False, routing="uniform"
    )
    # a tiny model is smaller than the process around it
    assert largest_whole(loop, 0.99) is None
    loop.file_bytes = 2**40
    assert largest_whole(loop, 0.99) == "q6_k"


def test_rows_of_a_uniform_type_stand_under_their_cap(loop):
    listed = Caps().cases(loop)
    tiers = {(case.cap, case.tier) for case in listed if case.cap and case.tier}
    assert tiers == {(0.6, "q2_k"), (0.8, "q3_k")}
    ours = next(case for case in listed if case.tier == "q3_k" and case.system == "engine")
    job = loop.job(ours, 0)
    assert "-q3_k-" in job.model
    assert job.low is None
    fewer = next(case for case in listed if case.role == "fewer")
    assert loop.job(fewer, 0).settings["experts_used"] == ("olmoe.expert_used_count", 1)


def test_only_rows_that_were_asked_for():
    cases = cap_cases(BenchOptions(caps=(0.5,)))
    assert {case.name for case in only(cases, ("lru", "dynaexq"))} == {"lru", "dynaexq 4/2"}
    assert only(cases, ()) == cases
    with pytest.raises(ConfigError, match="--rows firm: no row is left of upstream, repack"):
        only(cases, ("firm",))


def test_a_disk_without_room_is_said_before_anything_is_written(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = BenchOptions(shape="qwen3-30b", layers=48)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=20 * 10**9))
    notes = []
    with pytest.raises(MoeEdgeError, match=r"takes 25\.12 GiB, and .* has 18\.63 GiB"):
        models.build_models(options, notes.append)
    assert "writing 25.12 GiB" in notes[0]
    assert not list(tmp_path.rglob("*.gguf"))
