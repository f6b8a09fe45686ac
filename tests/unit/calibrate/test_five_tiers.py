"""Files with up to five precisions, down to one bit: pack, export, and compute."""

import time
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from gguf_tools import synthetic
from gguf_tools.experts import ExpertModel
from orchestrator.cli.main import cli
from orchestrator.config import Config
from orchestrator.events import Phase
from orchestrator.runtime.runtime import Runtime

# By method: (tiers, bits of the last tier, experts of the model). q1_0 stores a sign for each
# weight, which GPTQ makes usable. iq1_s is a codebook that needs an importance matrix.
TIERS = {
    "rtn": (("q8_0", "q4_k", "q3_k", "q2_k", "q1_0"), 1.125, 5),
    "gptq": (("q8_0", "q1_0"), 1.125, 2),
    "imatrix": (("q8_0", "iq1_s"), 1.5625, 2),
}
TEXT = "The fox sat by the river and looked at the stars. It was late, and nobody came. " * 8


@pytest.fixture(scope="module", params=TIERS)
def packed(request, library, tmp_path_factory):
    """(packed file, its tiers, method of the lower tiers)."""
    if request.param == "gptq":
        pytest.importorskip("torch", reason="torch is not installed (extra: convert)")
    folder = tmp_path_factory.mktemp(request.param)
    tiers, _, n_expert = TIERS[request.param]
    shape = replace(synthetic.preset("tiny-qwen3moe"), n_layer=1, n_expert=n_expert)
    source = synthetic.write(folder / "f16.gguf", shape, tiers=("f16",), seed=3)
    (folder / "calib.txt").write_text(TEXT)
    options = ["--tiers", ",".join(tiers), "--method", request.param, "--threads", "1"]
    if request.param != "rtn":
        options += ["--calib", str(folder / "calib.txt")]
    out = folder / "packed.gguf"
    result = CliRunner().invoke(cli, ["pack", str(source), str(out), *options])
    assert result.exit_code == 0, result.output
    return out, tiers, request.param


def decode(model, **options):
    config = Config.build(model=model, ctx=128, threads=1, use_extra_bufts=False, **options)
    with Runtime.open(config) as runtime, runtime.evaluator() as e:
        tokens = e.tokenize(TEXT)[:12]
        return np.stack([e.eval([t], at, phase=Phase.DECODE)[-1] for at, t in enumerate(tokens)])


def test_the_file_passes_verify_and_shows_its_tiers(packed):
    path, tiers, method = packed
    assert CliRunner().invoke(cli, ["verify", str(path)]).exit_code == 0
    shown = CliRunner().invoke(cli, ["inspect", str(path)]).output
    assert f"quantized by {method}; calibration: " in shown
    with ExpertModel.open(path) as model:
        assert tuple(tier.name for tier in model.tiers) == tiers
        assert model.tiers[-1].bpw == TIERS[method][1]
    assert all(f" {tier}  " in shown for tier in tiers)


def test_each_tier_is_exported_and_computes_the_same(packed, tmp_path):
    path, tiers, _ = packed
    seen = []
    for tier in tiers:
        out = tmp_path / f"{tier}.gguf"
        result = CliRunner().invoke(cli, ["export", str(path), str(out), "--tier", tier])
        assert result.exit_code == 0, result.output
        alone = decode(out, policy="plain")
        managed = decode(path, policy="lru", high_tier=tier, expert_ram=1 << 26)
        np.testing.assert_array_equal(managed, alone)
        seen.append(alone)
    # Fewer bits give a larger error.
    errors = [float(np.square(each - seen[0]).mean()) for each in seen]
    assert errors == sorted(errors) and errors[0] == 0 < errors[1]


def test_a_layer_computes_in_all_tiers_at_once(packed):
    path, tiers, _ = packed
    config = Config.build(model=path, ctx=128, threads=1, policy="context", hot_experts=1)
    with (
        Runtime.open(config.with_changes(near_bits=2.0, logits_all=True)) as runtime,
        runtime.evaluator() as e,
    ):
        store, tokens = e.inside.store, e.tokenize(TEXT)[:64]
        resident = store.resident()[0]
        if 1 not in resident:  # with an average of two bits for four experts, no expert is in q4_k
            expert = int(np.flatnonzero(resident == tiers.index("q2_k"))[0])
            assert store.transition([(0, expert, 1)]) == 1
            while not store.landed().any():
                time.sleep(0.001)
        logits = np.concatenate([part.copy() for part in e.eval_each(tokens, 0)])
        assert set(store.resident()[0]) == set(range(len(tiers)))
        computed = list(store.stats().computed[Phase.PREFILL])
    assert min(computed[: len(tiers)]) > 0 and not any(computed[len(tiers) :])
    assert np.isfinite(logits).all()
