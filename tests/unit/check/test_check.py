"""`moe-edge check`: a good model passes, and each kind of problem is reported."""

import json
import os
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
from click.testing import CliRunner
from tables import cases

from gguf_tools.experts import ExpertModel
from gguf_tools.pack import export, pack
from orchestrator.cli.main import cli
from orchestrator.config import Config
from orchestrator.errors import BudgetError
from orchestrator.lab.check import CheckOptions, budgets, checking, child, examine, render
from orchestrator.lab.check.checking import compare_rows, first_layer
from orchestrator.plan.records import Machine
from orchestrator.runtime.runtime import Runtime

FEW = ("--tokens", "5", "--ctx", "256", "--threads", "1")


@pytest.fixture(autouse=True)
def patient(library, monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture
def model(tiny_model):
    return tiny_model("qwen3moe", "q4_k", "q2_k")


@pytest.fixture
def one_budget(monkeypatch):
    """Only the smallest budget, because each budget runs in a process."""
    every = checking.budgets_of
    monkeypatch.setattr(checking, "budgets_of", lambda *given: every(*given)[:1])


def look(path, tokens=5, bar=lambda label, share: None, **options):
    """Run the check without verifying the file's blocks."""
    more = {name: options.pop(name) for name in ("all_tiers",) if name in options}
    config = Config.build(model=path, ctx=256, threads=1, **options)
    asked = CheckOptions(tokens=tokens, verify=False, **more)
    return examine(config, asked, bar)


def test_a_good_model(model, tmp_path):
    out = tmp_path / "report.json"
    done = CliRunner().invoke(cli, ["check", "-m", str(model), *FEW, "--json", "--out", str(out)])
    assert (done.exit_code, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert json.loads(out.read_text()) == report
    assert report["ok"] and report["managed"] and report["verified"]["ok"]
    assert str(model.parent) not in done.stdout  # the report has no paths of this machine
    (tier,) = report["tiers"]
    assert tier["tier"] == "q4_k"
    runs = tier["runs"]
    assert [run["budget"] for run in runs] == ["minimum", "half way", "everything"]
    promised = [run["promised_bytes"] for run in runs]
    assert promised == sorted(promised) and promised[0] < promised[2]
    for run in runs:
        assert run["compared"] == {
            "rows": 6, "equal": True, "first": None, "first_error": 0.0, "most": 0.0, "choices": 0,
            "finite": True,
        }  # fmt: skip
        assert 0 < run["peak_rss"] <= run["promised_bytes"]
        assert run["slot_bytes_peak"] <= run["budget_bytes"]
        assert run["prompt_tok_s"] > 0 and run["decode_tok_s"] > 0
    assert runs[0]["hit_rate"] < runs[2]["hit_rate"]
    # A whole micro-batch, limited by the context.
    assert [len(run["prompt"]) for run in (tier["plain"], *runs, report["as_asked"])] == [
        *[128] * 4,
        256 - 5,
    ]
    assert report["words"]["lost"] == [] and report["words"]["rendered"] > 20
    text = render(report)
    assert (
        "Good: every run equals llama.cpp bit for bit" in text and "chat template: ChatML" in text
    )
    cells = text.splitlines()[-1].strip("| ").split(" | ")
    assert len(cells) == 7 and cells[0] == report["model"] and cells[-1] == "0.1.0"
    assert cells[4].endswith(" s of 251") and cells[5] == "all in memory"


@pytest.mark.usefixtures("one_budget")
def test_a_wrong_precision_is_reported(model, monkeypatch):
    """If a run uses another precision, the report names the first different token, the first
    different layer and the size of the difference."""

    def wrong(src, dst, tier):
        assert tier == "q2_k"
        export(src, dst, "q4_k")

    monkeypatch.setattr(checking, "export", wrong)
    report = look(model, high_tier="q2_k")
    assert not report["ok"]
    (run,) = report["tiers"][0]["runs"]
    found = run["compared"]
    assert (found["equal"], found["first"], found["layer"][0]) == (False, 0, 0)
    assert 0 < found["first_error"] <= found["most"]
    assert found["layer"][1] > 0
    (said,) = report["problems"]
    assert "the logits differ from llama.cpp's. The first difference is after the prompt" in said
    assert "whose experts give other results than in llama.cpp is layer 0." in said
    assert "differ from 0" in render(report)


def test_a_later_layer_is_named(tiny_model, tmp_path):
    """If two files differ only in the experts of the last layer, the report names this layer."""
    model = tiny_model("qwen3moe", "q4_k")
    damaged = tmp_path / "other.gguf"
    data = bytearray(model.read_bytes())
    with ExpertModel.open(model) as opened:
        for each in opened.slices[2]:
            for place in each:
                if place is not None:
                    # the lowest bit of each 4-bit number
                    blocks = np.frombuffer(data, np.uint8, place.expert_bytes * 8, place.offset)
                    blocks.reshape(-1, 144)[:, 16:] ^= 1
    damaged.write_bytes(data)
    assert compare_layers(model, damaged, tmp_path) == 2
    assert compare_layers(model, model, tmp_path) is None


def as_run(config):
    """Return the request of a check's process for these settings."""
    return budgets.CheckJob(budgets.settings_of(config), os.devnull, None, 0).request()


def compare_layers(one, other, folder):
    from orchestrator.lab.check.budgets import CheckJob, run_job, settings_of

    paths = []
    for path in (one, other):
        paths.append(folder / f"{len(paths)}.npz")
        config = Config.build(model=path, policy="lru", ctx=256, threads=1, expert_ram=1 << 20)
        job = CheckJob(settings_of(config), str(paths[-1]), 0, 0, [5, 6, 7, 8], [9], layers=True)
        assert run_job(job) == {"layers": [0, 1, 2]}
    found = first_layer(*paths)
    return found[0] if found else None


def test_lower_tiers_of_one_file_and_of_two(tiny_model):
    high, low = tiny_model("qwen3moe", "q4_k"), tiny_model("qwen3moe", "q2_k")
    report = look(high, low=low, all_tiers=True)
    assert report["ok"], report["problems"]
    assert [tier["tier"] for tier in report["tiers"]] == ["q4_k", "q2_k"]
    assert report["as_asked"]["mode"].startswith("managed: dymoe q4_k/q2_k")


@pytest.mark.usefixtures("one_budget")
def test_memory_above_the_plan_is_reported(model, monkeypatch):
    from orchestrator.lab.check.budgets import run_job

    def swollen(job):
        run = run_job(job)
        return run | {"peak_rss": (run["promised_bytes"] or 0) + 1}

    monkeypatch.setattr(checking, "run_job", swollen)
    report = look(model)
    assert not report["ok"]
    (said,) = report["problems"]
    assert "minimum (lru): used" in said and "more than planned" in said


def test_a_truncated_file_is_reported(model, tmp_path):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(model.read_bytes()[: model.stat().st_size // 2])
    done = CliRunner().invoke(cli, ["check", "-m", str(cut), *FEW])
    assert done.exit_code == 1
    assert done.stdout.count("extend past the end of the file") == 1
    assert "Not good: 1 problem, see above." in done.stdout
    assert done.stderr == ""


@pytest.mark.usefixtures("one_budget")
def test_damage_that_still_computes_is_reported(model, tmp_path):
    """A NaN scale is reported by the file check and by the comparison of logits."""
    damaged = tmp_path / "nan.gguf"
    data = bytearray(model.read_bytes())
    with ExpertModel.open(model) as opened:
        for kind in opened.slices[0]:
            if kind[0] is not None:
                for expert in range(8):
                    at = kind[0].offset + expert * kind[0].expert_bytes
                    data[at : at + 2] = b"\xff\x7f"
    damaged.write_bytes(data)
    done = CliRunner().invoke(cli, ["check", "-m", str(damaged), *FEW])
    assert done.exit_code == 1
    assert "found nan value at block 0" in done.stdout or "nan" in done.stdout.lower()
    assert "the model computed NaN among the logits" in done.stdout
    assert "Traceback" not in done.output


def test_a_model_without_experts_is_reported(tmp_path):
    path = tmp_path / "dense.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    for step in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{step}_to_file")()
    writer.close()
    report = look(path)
    assert not report["ok"]
    assert len(report["problems"]) == 1 and "no expert" in report["problems"][0]


def test_a_model_that_runs_only_on_llama_cpps_own_path_is_reported(tiny_model, monkeypatch):
    from orchestrator.native import llama

    monkeypatch.setattr(llama, "EXPERT_PATTERN", rb"blk\.\d+\.ffn_gate_inp\.weight")
    report = look(tiny_model("mixtral", "q4_k"))
    [problem] = report["problems"]
    assert "cannot manage its experts: blk.0.ffn_gate_inp.weight is read by MUL_MAT" in problem
    assert report["tiers"][0]["plain"]["decode_tok_s"] > 0
    assert report["words"]["lost"] == []


def test_too_little_memory_is_reported(model):
    report = look(model, ram=1 << 20)
    assert any("--ram 1 MiB is too small" in each for each in report["problems"])
    assert all("Traceback" not in each for each in report["problems"])


def test_a_cap_holds_for_the_check_and_a_run_together(model, monkeypatch):
    """Each run gets the limit minus the memory of the check. A refusal names both amounts."""
    own, seen = 40 << 20, []

    def too_little(job):
        seen.append(job.settings)
        return {"error": "of the run alone", "needed_bytes": 96 << 20}

    monkeypatch.setattr(checking, "private_bytes", lambda: own)
    monkeypatch.setattr(checking, "run_job", too_little)
    report = look(model, ram=200 << 20)
    plain, *managed = seen
    assert "Of the memory limit --ram, moe-edge check itself uses 40 MiB" in render(report)
    # A model that fits the limit is not mapped.
    assert (plain["ram"], plain["use_mmap"]) == (None, None)
    assert managed[-1]["ram"] == (200 << 20) - own
    # Comparisons reserve scratch only for the tokens of one step.
    assert [each["ubatch"] for each in seen] == [*[128] * (len(seen) - 1), None]
    assert all(each["ram"] <= (200 << 20) - own for each in managed)
    said = report["problems"][-1]
    assert said == (
        "as asked: --ram 200 MiB is too small. The minimum is 136 MiB "
        "(96 MiB for the model, 40 MiB for moe-edge check)"
    )


@pytest.mark.usefixtures("one_budget")
def test_max_loss_chooses_the_same_plan_as_for_a_chat(tiny_model, monkeypatch):
    """--max-loss chooses the plan once, with the whole limit, before the check's own memory is
    subtracted. With another limit another plan might be chosen and stored."""
    own, ram = 40 << 20, 200 << 20
    asked = {"ram": ram, "max_loss": 0.1, "remember": True}

    class Chooses:
        def __init__(self, request, _model):
            assert request.needs.conversations
            assert request.config == Config.build(**{**asked, "ram": ram - own})

        def runs(self, config):
            assert config == Config.build(**asked)
            chosen = config.compared(policy="lru", high_tier="q2_k", max_loss=None)
            return SimpleNamespace(config=chosen)

    jobs = []

    def runs(job):
        if job.other_bytes is not None:
            assert not jobs
            return child.run(job)
        jobs.append(job)
        return {"error": "none"}

    monkeypatch.setattr(child, "Planner", Chooses)
    monkeypatch.setattr(checking, "private_bytes", lambda: own)
    monkeypatch.setattr(checking, "run_job", runs)
    high, low = tiny_model("qwen3moe", "q4_k"), tiny_model("qwen3moe", "q2_k")
    asked |= {"model": high, "low": low, "ctx": 256, "threads": 1}
    examine(Config.build(**asked), CheckOptions(tokens=5, verify=False), lambda *_: None)
    *compared, last = jobs
    assert not any(each.chosen for each in compared)
    # llama.cpp's own path is loaded as for chat, and tests the chat template
    assert all(each.conversations == each.answers for each in compared)
    loaded_as_a_chat = [each.settings["policy"] for each in jobs if each.answers]
    assert loaded_as_a_chat == ["plain", "lru"]
    last_settings = {name: last.settings[name] for name in ("policy", "high_tier", "ram")}
    assert last_settings == {"policy": "lru", "high_tier": "q2_k", "ram": ram - own}
    assert last.chosen and last.conversations
    assert not last.settings["remember"] and "max_loss" not in last.settings


def test_a_model_above_the_limit_is_mapped(model):
    config = Config.build(model=model, ram=32 << 20, ctx=256, threads=1)
    assert budgets.plain(config, model, Machine(8 << 30)).use_mmap is True
    roomy = config.with_changes(ram=1 << 30)
    assert budgets.plain(roomy, model, Machine(8 << 30)).use_mmap is None
    assert budgets.plain(roomy, model, Machine(64 << 20)).use_mmap is True


def rows_of(path, rows):
    path.write_bytes(rows.astype(np.float32).tobytes())
    return path


def test_bits_are_compared(tmp_path):
    reference = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
    reference[2, 3] = 0.0
    plain = rows_of(tmp_path / "plain", reference)

    def compared(rows):
        return compare_rows(rows_of(tmp_path / "ours", rows), plain, 8)

    assert compared(reference)["equal"]
    zero = reference.copy()
    zero[2, 3] = -0.0
    assert (compared(zero)["first"], compared(zero)["most"]) == (2, 0.0)
    moved = reference.copy()
    moved[1, 2] += 0.5
    moved[3, (reference[3].argmax() + 1) % 8] += 100
    found = compared(moved)
    assert (found["first"], found["choices"]) == (1, 1)
    assert found["first_error"] == pytest.approx(0.5)
    assert found["most"] == pytest.approx(100)
    odd = reference.copy()
    odd[0, 0] = np.nan
    found = compared(odd)
    assert (found["finite"], found["first"], found["first_error"]) == (False, 0, None)
    assert compared(reference[:3])["first"] == 3


@cases(
    "tiers, settings, largest",
    ("q4_1,q2_0", {}, "everything"),
    ("q4_1,q2_0", {"ram": 2.0}, "everything"),
    ("q8_0", {"ram": 0.5}, "all of --ram"),
)
def test_budgets_are_those_that_the_runs_plan(tiers, settings, largest, tiny_model, tmp_path):
    """The smallest budget works exactly, and only a run that holds every expert is called
    "everything". ram: fraction of all experts' bytes, added to the smallest budget."""
    packed = tmp_path / "packed.gguf"
    pack(tiny_model("olmoe", "f16"), packed, tiers.split(","))
    with ExpertModel.open(packed) as model:
        every, tier = model.tier_bytes[0], model.tiers[0].name
    config = Config.build(model=packed, ctx=256, threads=1)
    (_, least), *_ = budgets.budgets_of(config, packed, tier)
    if "ram" in settings:
        config = config.with_changes(ram=least.ram + int(settings["ram"] * every))
    found = budgets.budgets_of(config, packed, tier)
    assert [name for name, _ in found] == ["minimum", "half way", largest]
    for name, run in found:
        with Runtime.open(as_run(run)) as runtime, runtime.evaluator() as e:
            assert (e.plan.absent_bytes == 0) == (name == "everything")
    less = least.with_changes(ram=least.ram - 1)
    with pytest.raises(BudgetError), Runtime.open(as_run(less)):
        pass
