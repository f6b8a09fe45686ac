import json
import xml.etree.ElementTree as ET

import pytest

from gguf_tools import synthetic
from gguf_tools.experts import ExpertModel
from orchestrator.errors import ConfigError
from orchestrator.lab.bench import loop
from orchestrator.lab.bench.ablation import (
    BASELINE,
    CACHE,
    CACHE_AHEAD,
    COLD,
    MIXED,
    MIXED_AHEAD,
    SKIP_AHEAD,
    Ablation,
    AblationOptions,
    _paper_notes,
    ablation_cases,
    paper_rows,
)
from orchestrator.lab.bench.cases import MANAGED
from orchestrator.lab.bench.job import DECODE, PROMPT
from orchestrator.lab.bench.models import DEMO_TEXT
from orchestrator.lab.table import WIDTH
from orchestrator.memory.footprint import model_shape
from orchestrator.policy.lru import LRU

ROWS = [BASELINE, CACHE, CACHE_AHEAD, MIXED, MIXED_AHEAD, SKIP_AHEAD]
DECODE_MS = dict(zip(ROWS, (100.0, 50.0, 40.0, 45.0, 25.0, 20.0), strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"turns": 0}, "'turns' must be 1 or more, not 0"),
        ({"prefetch": "off"}, "'prefetch' must be on or auto, not 'off'"),
        ({"caps": (60.0,)}, "between 0 and 100"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        AblationOptions(**options)


def test_rows_differ_in_one_part_each():
    rows = {case.name: case for case in paper_rows(0.6, 0.75, "on")}
    assert list(rows) == ROWS
    settings = {name: case.settings for name, case in rows.items()}
    assert [case.one_token for case in rows.values()] == [True] + [False] * 5
    assert settings[CACHE] == settings[CACHE_AHEAD] | {"prefetch": "off"}
    assert settings[MIXED] == settings[MIXED_AHEAD] | {"prefetch": "off"}
    assert settings[MIXED] == settings[CACHE] | {"retention": 0.75, "low_tier": "q2_k"}
    assert settings[SKIP_AHEAD] == settings[MIXED_AHEAD] | {"low_tier": "skip"}
    assert settings[CACHE_AHEAD]["prefetch"] == "on"


def test_upstream_stands_beside_them_only_where_it_is_capped():
    def names(**options):
        return [(case.name, case.cap) for case in ablation_cases(AblationOptions(**options))]

    assert names(caps=(0.6,)) == [
        (MANAGED, None),
        ("upstream mmap", 0.6),
        ("lru", 0.6),
        *((name, 0.6) for name in ROWS),
    ]
    assert ("upstream mmap", 0.6) not in names(caps=(0.6,), shape="demo")


def test_ttft_is_taken_cold_and_after_decoding():
    parts = AblationOptions(tokens=10, turns=3, prompt_tokens=7, warmup=5).parts()
    assert [(part.name, part.kind, part.n) for part in parts] == [
        (COLD, PROMPT, 7),
        ("settle", DECODE, 5),
        *[(PROMPT, PROMPT, 7), (DECODE, DECODE, 4)] * 3,
    ]
    assert sum(part.seconds for part in parts if part.name == DECODE) == pytest.approx(45)


def test_slots_of_one_token_hold_k_experts_of_one_layer(tmp_path):
    model = ExpertModel.open(synthetic.write(tmp_path / "m.gguf", "tiny-olmoe"))
    budget = loop.token_slot_bytes(model)
    policy = LRU(model_shape(model, (0,)))
    assert {group.n_slots for group in policy.plan(budget).groups} == {model.n_expert_used}


def fake_run(job):
    """What a process of this job would print, with speeds from DECODE_MS."""
    settings = job.settings
    low, prefetch = settings.get("low_tier"), settings.get("prefetch")
    name = {
        (None, "off"): CACHE,
        (None, "on"): CACHE_AHEAD,
        ("q2_k", "off"): MIXED,
        ("q2_k", "on"): MIXED_AHEAD,
        ("skip", "on"): SKIP_AHEAD,
    }.get((low, prefetch))
    if settings.get("policy") == "lru" and job.system == "engine":
        name = BASELINE
    if name is None:
        return {"error": "does not fit: ended by the kernel, out of memory"}
    parts = []
    for i, part in enumerate(job.parts):
        ms = DECODE_MS[name]
        times = [ms] * part.n if part.kind == DECODE else [10 * ms if part.name == COLD else 3 * ms]
        store = {
            "requests": 10,
            "hits": 4 if part.name == DECODE else 10,
            "bytes": 2e6 * part.n,
            "needed_bytes": 1e6 * part.n,
            "wait_ms": 1.0,
            "routed": {"high": 3, "low": 0, "skip": 1} if low == "skip" else {"high": 4, "low": 0},
            "budget_bytes": 2**20 + i,
            "direct_io": True,
        }
        store["routed"].setdefault("skip", 0)
        parts.append(
            {"name": part.name, "tokens": part.n, "ms": times, "store": store, "callback_us": 9.0}
        )
    recall = [None, 0.5, 0.75] if prefetch == "on" else [None, None, None]
    policy = {"prefetch": prefetch, "recall": recall, "precision": [None, 0.5, 0.25]}
    return {"parts": parts, "peak_rss": 50 * 2**20, "mode": "m", "policy": policy}


@pytest.fixture
def faked(monkeypatch, no_disk):
    jobs = []

    def spawn(self, job, group):
        jobs.append(job)
        return fake_run(job)

    monkeypatch.setattr(loop.Loop, "_spawn", spawn)
    options = AblationOptions(quick=True, caps=(0.6, 0.8), runs=2, tokens=6, warmup=2)
    return Ablation().run(options), jobs


def test_speedups_refer_to_load_on_demand_under_the_same_cap(faked):
    report, jobs = faked
    rows = {(row["name"], row["cap"]): row for row in report["cases"]}
    for cap in (0.6, 0.8):
        for name in ROWS:
            row = rows[name, cap]
            assert row["speedup_tpot"] == pytest.approx(100 / DECODE_MS[name])
            assert row["speedup_ttft"] == pytest.approx(100 / DECODE_MS[name])
            assert row["ttft_ms"] == pytest.approx(3 * DECODE_MS[name])
            assert row["ttft_cold_ms"] == pytest.approx(10 * DECODE_MS[name])
            assert row["hit_rate"] == pytest.approx(0.4)  # of measured decode steps alone
            assert row["bytes_per_token"] == pytest.approx(2e6)
    assert rows[SKIP_AHEAD, 0.6]["mix"] == {"high": 0.75, "low": 0.0, "skip": 0.25}
    assert "speedup_tpot" not in rows[MANAGED, None]
    slots = [job.settings["expert_ram"] for job in jobs if job.settings.get("expert_ram")]
    assert slots.count(min(slots)) == 4  # row 1: two caps, two runs
    json.dumps(report)


def test_rows_are_measured_in_turn(faked):
    _, jobs = faked
    seeds = [job.seed for job in jobs]
    assert seeds == sorted(seeds)
    assert seeds.count(0) == seeds.count(1) == 15


def test_table_fits_the_terminal_and_names_everything(faked):
    report, _ = faked
    text = Ablation().text(report)
    assert max(map(len, text.splitlines())) <= WIDTH
    for phrase in (*ROWS, "75/0/25", "zipf routing", "peak 50 MiB", "expert slots of 80%"):
        assert phrase in text
    assert "    recall - 50 75\n    precision - 50 25" in text
    assert f"{CACHE}: prefetch" not in text


def test_a_failed_row_is_shown_and_has_no_speedup(monkeypatch, no_disk):
    def spawn(self, job, group):
        return {"error": "died of SIGILL"} if "low_tier" in job.settings else fake_run(job)

    monkeypatch.setattr(loop.Loop, "_spawn", spawn)
    report = Ablation().run(AblationOptions(quick=True, caps=(0.6,), runs=1, tokens=6))
    assert "died of SIGILL" in Ablation().text(report)
    assert [row["name"] for row in report["cases"] if "error" in row] == [
        MIXED,
        MIXED_AHEAD,
        SKIP_AHEAD,
    ]


def test_plot_shows_every_row_of_every_cap(faked, tmp_path):
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    from orchestrator.lab.bench.ablation import draw_bars

    report, _ = faked
    (tmp_path / "a" / "b").mkdir(parents=True)
    png, svg = draw_bars(report, tmp_path / "a" / "b")
    assert png.read_bytes().startswith(b"\x89PNG")
    texts = ["".join(node.itertext()) for node in ET.parse(svg).iter() if node.tag.endswith("text")]
    for name in (*ROWS, "cap of 60%", "cap of 80%", "TTFT, ms", "TPOT, ms (median step)"):
        assert name in texts
    assert texts.count("20.0  (5.00x)") == 2  # row 6 under both caps
    assert any("tiny-olmoe" in text for text in texts)
    again = draw_bars(report, tmp_path)[1]
    assert again.read_bytes() == svg.read_bytes()


def test_demo_text_is_what_its_generator_makes():
    from models.demo.training.sample import conversations

    assert DEMO_TEXT.read_text("utf-8") == "%\n".join(conversations())


def test_what_does_not_fit_the_model_is_refused_before_measuring(no_disk):
    options = AblationOptions(shape="demo", prompt_tokens=900, tokens=900)
    with pytest.raises(ConfigError, match="context of 1280 tokens, the model was made for 1024"):
        Ablation().run(options)


@pytest.mark.parametrize("shape", ["olmoe", "demo"])
def test_quick_ablation_end_to_end(real_engine, shape):
    options = AblationOptions(
        shape=shape, quick=True, caps=(0.6,), tokens=24, warmup=4, runs=1, threads=1
    )
    report = Ablation().run(options)
    rows = {row["name"]: row for row in report["cases"]}
    failed = {name: row["error"] for name, row in rows.items() if "error" in row}
    assert not failed
    assert report["model"]["shape"] == ("demo" if shape == "demo" else "tiny-olmoe")
    # What load on demand reads is gone when it is needed again; a cache keeps some of it.
    assert rows[BASELINE]["hit_rate"] == 0.0
    assert rows[MANAGED]["hit_rate"] == 1.0
    for name in ROWS[1:]:
        assert 0 < rows[name]["hit_rate"] < 1
        assert rows[name]["bytes_per_token"] < rows[BASELINE]["bytes_per_token"]
    assert rows[MIXED]["mix"]["low"] > 0 < rows[SKIP_AHEAD]["mix"]["skip"]
    assert rows[CACHE]["mix"]["high"] == 1.0
    recall = rows[CACHE_AHEAD]["policy"]["recall"]
    assert recall[0] is None and all(0 < share <= 1 for share in recall[1:])
    assert all(share is None for share in rows[CACHE]["policy"]["recall"])
    assert report["options"]["routing"] == ("trained" if shape == "demo" else "zipf")


def test_a_goal_that_plain_lru_meets_as_well_says_so():
    def line(lru, skipping):
        rows = [
            {"name": "lru", "speedup_tpot": lru},
            {"name": SKIP_AHEAD, "speedup_tpot": skipping},
            {"name": MIXED_AHEAD, "error": "died"},
        ]
        (found,) = _paper_notes(rows)
        return found

    assert line(2.0, 3.0).endswith("the paper's x 2.67: met")
    assert line(2.7, 3.0).endswith("met; met by LRU as well: x 2.70")
    assert line(2.0, 2.5).endswith("MISSED")
