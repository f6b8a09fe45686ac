"""What is kept between runs so that the same command takes the same plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gguf_tools import synthetic
from gguf_tools.experts import ExpertModel
from orchestrator.config import Config
from orchestrator.cost import disk
from orchestrator.cost.disk import Bandwidth, kept_bandwidth
from orchestrator.cost.plans import TakenPlans
from orchestrator.cost.speeds import APART_S


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ExpertModel:
    path = tmp_path_factory.mktemp("taken") / "two.gguf"
    return ExpertModel.open(synthetic.write(path, "tiny-olmoe", tiers=("q4_k", "q2_k")))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "moe-edge"


def ask(model: ExpertModel, **settings: Any) -> Config:
    return Config.build(model=model.path, **settings)


@pytest.mark.parametrize(
    ("asked", "same"),
    [
        ({"max_loss": 0.01}, True),
        ({"max_loss": 0.01, "temp": 0.1, "max_tokens": 9}, True),
        ({"max_loss": 0.01, "prompt_cache_limit": 1 << 20}, True),
        ({"max_loss": 0.01, "conversations": True}, False),
        ({"max_loss": 0.01, "sequences": 4}, False),
        ({"max_loss": 0.01, "scored": 4}, False),
        ({"max_loss": 0.01, "beside": 1 << 20}, False),
        ({"max_loss": 0.01, "beside_token": 8}, False),
        ({"max_loss": 0.01, "cache_ram": 0}, False),
        ({"max_loss": 0.01, "logits_all": True}, False),
        ({"max_loss": 0.02}, False),
        ({"max_loss": 0.01, "ram": 1 << 30}, False),
        ({"max_loss": 0.01, "threads": 1}, False),
    ],
)
def test_a_command_is_known_by_what_it_asks_of_the_model(
    model: ExpertModel, asked: dict[str, Any], same: bool
) -> None:
    settings = {"policy": "floor", "high_tier": "q4_k", "max_loss": 0.008, "low_tier": None}
    TakenPlans(ask(model, max_loss=0.01), model).keep(settings)
    found = TakenPlans(ask(model, **asked), model).recall()
    kept = {"policy": "floor", "high_tier": "q4_k", "low_tier": None}
    assert found == (kept if same else None)


def test_what_is_damaged_counts_as_nothing(model: ExpertModel, cache: Path) -> None:
    taken = TakenPlans(ask(model), model)
    taken.keep({"policy": "lru"})
    (path,) = (cache / "plans").iterdir()
    for text in ("", "[]", '{"format": "moe-edge plans 1", "taken": 3}', "{"):
        path.write_text(text)
        assert taken.recall() is None
        taken.keep({"policy": "lru"})
        assert taken.recall() == {"policy": "lru"}


def test_a_disk_keeps_its_speed(model: ExpertModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is measured once a moment, though the first ones agree: both may have been disturbed. The
    best of all stands. What was measured for another reason counts as well."""
    now, speeds = [1e9], [4e8, 4.1e8, 1e9, 1e9, 9e8, 1e9]
    measured: list[float] = []

    def read_bandwidth(*_: object, **__: object) -> Bandwidth:
        measured.append(speeds[len(measured)])
        return Bandwidth(measured[-1], True, 4096, 0.0, 0.0)

    monkeypatch.setattr(disk, "read_bandwidth", read_bandwidth)
    monkeypatch.setattr(disk, "time", lambda: now[0])
    config = ask(model)
    for times, wait, best in (
        (1, 0.0, 4e8),
        (1, 1.0, 4e8),
        (2, APART_S, 4.1e8),
        (3, APART_S, 1e9),
        *((each, APART_S, 1e9) for each in (4, 5, 6)),
        (6, 10 * APART_S, 1e9),
    ):
        now[0] += wait
        assert kept_bandwidth(model, config).bytes_per_s == pytest.approx(best)
        assert len(measured) == times
    told = Bandwidth(2e9, True, 4096, 0.0, 0.0)
    for found in (kept_bandwidth(model, config, told), kept_bandwidth(model, config)):
        assert found.bytes_per_s == pytest.approx(2e9)


def test_a_disk_is_known_by_its_device(
    model: ExpertModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another disk may be mounted at the same place, with the same file on it."""
    for device, speed in enumerate((1e9, 2e9, 1e9)):
        monkeypatch.setattr(disk, "device_of", lambda _path, at=device: at)
        told = Bandwidth(speed, True, 4096, 0.0, 0.0)
        assert kept_bandwidth(model, ask(model), told).bytes_per_s == pytest.approx(speed)
    assert len(list((cache / "speed").iterdir())) == 3
