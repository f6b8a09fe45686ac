"""Profiles of expert use: the round trip, and every file that is refused."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from gguf_tools import synthetic
from gguf_tools.experts import ExpertModel
from orchestrator.cache import files, profile
from orchestrator.cache.profile import HotnessKeeper, TunedKeeper
from orchestrator.config import Config
from orchestrator.errors import ProfileError


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models that differ in their weights and in nothing else that is in the header but a
    name; a third one of another size."""
    folder = tmp_path_factory.mktemp("profile")
    tiers = ("q4_k", "q2_k")
    return [
        synthetic.write(folder / "one.gguf", "tiny-qwen3moe", tiers=tiers),
        synthetic.write(folder / "two.gguf", "tiny-qwen3moe", tiers=("q8_0", "q4_k")),
        synthetic.write(folder / "three.gguf", "tiny-olmoe", tiers=tiers),
    ]


@pytest.fixture
def model(paths: list[Path]) -> ExpertModel:
    return ExpertModel.open(paths[0])


def scores(model: ExpertModel) -> np.ndarray:
    return np.random.default_rng(0).gamma(1.0, 30.0, (model.n_layers, model.n_expert))


def remember(model: ExpertModel, **options: object) -> HotnessKeeper:
    """An engine's memory, after it looked for what earlier runs learned."""
    memory = HotnessKeeper(Config.build(model=model.path, policy="dynaexq", **options), model)
    memory.recall()
    return memory


def test_identity_is_the_file_and_not_its_name(paths: list[Path], tmp_path: Path) -> None:
    copy = tmp_path / "other-name.gguf"
    copy.write_bytes(paths[0].read_bytes())
    ours, theirs, *others = (ExpertModel.open(each) for each in (paths[0], copy, *paths[1:]))
    assert profile.identity(ours) == profile.identity(theirs)
    assert len({profile.identity(each) for each in (ours, *others)}) == 3
    with open(copy, "ab") as file:
        file.write(b"\0" * 4096)
    assert profile.identity(ExpertModel.open(copy)) != profile.identity(ours)


def test_a_profile_of_another_model_is_refused(paths: list[Path], tmp_path: Path) -> None:
    path = tmp_path / "hot.json"
    made_with, other = ExpertModel.open(paths[0]), ExpertModel.open(paths[2])
    profile.save(path, made_with, scores(made_with))
    with pytest.raises(ProfileError, match=r"hot\.json.*another model \(one\.gguf\)"):
        profile.load(path, other)
    with pytest.raises(ProfileError, match="another model"):
        remember(other, profile=path)


def broken(text: str) -> list[bytes]:
    """The same profile, damaged in one way each."""
    data = json.loads(text)
    hotness = data["hotness"]

    def changed(**entries: object) -> bytes:
        return json.dumps({**data, **entries}).encode()

    return [
        b"",
        text[: len(text) // 2].encode(),
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        changed(format="something else"),
        changed(version=99),
        changed(model=7),
        changed(name=None),
        changed(hotness=hotness[1:]),
        changed(hotness=[hotness[0][1:], *hotness[1:]]),
        changed(hotness=[[-1.0, *hotness[0][1:]], *hotness[1:]]),
        changed(hotness=[["x", *hotness[0][1:]], *hotness[1:]]),
        changed(hotness=[[None, *hotness[0][1:]], *hotness[1:]]),
        changed(hotness={"0": 1}),
        changed(hotness=[[float("nan"), *hotness[0][1:]], *hotness[1:]]),
        changed(hotness=[[1e999, *hotness[0][1:]], *hotness[1:]]),
    ]


def test_damaged_profiles_are_named(model: ExpertModel, tmp_path: Path) -> None:
    path = tmp_path / "hot.json"
    profile.save(path, model, scores(model))
    for damaged in broken(path.read_text()):
        path.write_bytes(damaged)
        with pytest.raises(ProfileError, match=r"hot\.json: "):
            profile.load(path, model)
        with pytest.raises(ProfileError, match=r"hot\.json: "):
            remember(model, profile=path)


def test_reading_takes_no_more_memory_than_the_file(model: ExpertModel, tmp_path: Path) -> None:
    path = tmp_path / "hot.json"
    path.write_text("{}")
    tracemalloc.start()
    try:
        with pytest.raises(ProfileError):
            profile.load(path, model)
        path.open("r+").truncate(1 << 40)
        with pytest.raises(ProfileError):
            profile.load(path, model)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_damaged_cache_is_left_aside(model: ExpertModel) -> None:
    path = profile.cached_path(model)
    profile.save(path, model, scores(model))
    kept = remember(model, remember=True)
    assert kept.note is None
    np.testing.assert_allclose(kept.recall(), scores(model), rtol=1e-5)
    path.write_text("{")
    fresh = remember(model, remember=True)
    assert fresh.recall() is None
    assert fresh.note is not None
    assert str(path) in fresh.note
    fresh.learn(scores(model))
    fresh.save()
    assert remember(model, remember=True).note is None


def test_nothing_is_kept_unasked(model: ExpertModel, user_folder: Path) -> None:
    quiet = remember(model)
    quiet.learn(scores(model))
    quiet.save()
    assert not profile.cached_path(model).exists()
    unused = remember(model, remember=True)
    unused.learn(np.zeros((model.n_layers, model.n_expert)))
    unused.save()
    assert not profile.cached_path(model).exists()


def test_a_new_profile_is_made(model: ExpertModel, tmp_path: Path) -> None:
    path = tmp_path / "new.json"
    memory = remember(model, profile=path)
    assert memory.recall() is None
    memory.learn(scores(model))
    memory.save()
    np.testing.assert_allclose(profile.load(path, model).hotness, scores(model), rtol=1e-5)
    with pytest.raises(ProfileError, match="no such folder"):
        remember(model, profile=tmp_path / "nowhere" / "new.json")


def test_a_failed_write_leaves_the_old_profile(
    model: ExpertModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "hot.json"
    profile.save(path, model, scores(model))
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        profile.save(path, model, 2 * scores(model))
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["hot.json"]
    for options in ({"profile": path}, {"remember": True}):
        memory = remember(model, **options)
        memory.learn(scores(model))
        if "profile" in options:
            with pytest.raises(OSError, match="No space"):
                memory.save()
        else:
            memory.save()  # the cache is a convenience


def test_what_a_policy_tuned_is_kept_for_the_next_start(paths: list[Path]) -> None:
    """By policy and model, in the user cache, where that is asked for; what is damaged there
    counts as nothing."""
    model, other = ExpertModel.open(paths[0]), ExpertModel.open(paths[2])
    config = Config.build(model=model.path, remember=True)
    keeper = TunedKeeper(config, model)
    assert keeper.recall("firm") is None
    keeper.learn("firm", {"votes": "4,1"})
    keeper.save()
    assert TunedKeeper(config, model).recall("firm") == {"votes": "4,1"}
    assert TunedKeeper(config, model).recall("dymoe") is None
    assert TunedKeeper(config, other).recall("firm") is None
    without = Config.build(model=model.path)
    assert TunedKeeper(without, model).recall("firm") is None
    (path,) = (files.user_folder("cache") / "tuned").iterdir()
    for text in ("{", "[]", '{"format": "moe-edge tuned", "policies": {"firm": 3}}'):
        path.write_text(text)
        assert TunedKeeper(config, model).recall("firm") is None
