"""Files of the user: errors of writing name the file, and profiles of expert usage are checked when
read."""

import contextlib
import errno
import json
import os
import signal
import stat
import tracemalloc

import numpy as np
import pytest

from gguf_tools import interrupts, synthetic
from gguf_tools.experts import ExpertModel
from orchestrator.cache import files, profile
from orchestrator.cache.files import check_target, user_folder, whole_file, whole_files, write_whole
from orchestrator.cache.profile import HotnessKeeper, TunedKeeper, UsageKeeper
from orchestrator.config import Config
from orchestrator.errors import ProfileError
from patches.upstream import cache_dir


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Three models. The first two differ only in their weights and in the name in the header; the
    third has another size."""
    folder = tmp_path_factory.mktemp("profile")
    tiers = ("q4_k", "q2_k")
    return [
        synthetic.write(folder / "one.gguf", "tiny-qwen3moe", tiers=tiers),
        synthetic.write(folder / "two.gguf", "tiny-qwen3moe", tiers=("q8_0", "q4_k")),
        synthetic.write(folder / "three.gguf", "tiny-olmoe", tiers=tiers),
    ]


@pytest.fixture
def model(paths):
    return ExpertModel.open(paths[0])


def scores(model):
    return np.random.default_rng(0).gamma(1.0, 30.0, (model.n_layers, model.n_expert))


def remember(model, **options):
    """A keeper of hotness that has read the results of earlier runs."""
    memory = HotnessKeeper(Config.build(model=model.path, policy="dynaexq", **options), model)
    memory.recall()
    return memory


def test_identity_is_the_file_and_not_its_name(paths, tmp_path):
    copy = tmp_path / "other-name.gguf"
    copy.write_bytes(paths[0].read_bytes())
    ours, theirs, *others = (ExpertModel.open(each) for each in (paths[0], copy, *paths[1:]))
    assert profile.identity(ours) == profile.identity(theirs)
    assert len({profile.identity(each) for each in (ours, *others)}) == 3
    with open(copy, "ab") as file:
        file.write(b"\0" * 4096)
    assert profile.identity(ExpertModel.open(copy)) != profile.identity(ours)


@pytest.mark.parametrize("named", [True, False])
def test_results_are_saved_for_the_file_that_was_opened(paths, tmp_path, user_folder, named):
    """If another file takes the model's path during the run, results are saved for the file that
    was opened."""
    path, profiles = tmp_path / "model.gguf", tmp_path / "hot.json"
    path.write_bytes(paths[0].read_bytes())
    model = ExpertModel.open(path)
    config = Config.build(
        model=path, policy="dynaexq", remember=True, **({"profile": profiles} if named else {})
    )
    hotness, usage, tuned = (
        kind(config, model) for kind in (HotnessKeeper, UsageKeeper, TunedKeeper)
    )
    other = tmp_path / "other.gguf"
    other.write_bytes(paths[1].read_bytes())
    other.rename(path)
    hotness.learn(scores(model))
    usage.learn(scores(model))
    tuned.learn("dynaexq", {"a": 1})
    for keeper in (hotness, usage, tuned):
        keeper.save()
    opened, replaced = ExpertModel.open(paths[0]), ExpertModel.open(path)
    for kind in ("usage", "tuned") if named else ("hotness", "usage", "tuned"):
        assert profile.cached_path(opened, kind).exists()
        assert not profile.cached_path(replaced, kind).exists()
    if named:
        assert profile.load(profiles, opened) is not None
        with pytest.raises(ProfileError, match="another model"):
            profile.load(profiles, replaced)


def test_a_profile_of_another_model_is_refused(paths, tmp_path):
    path = tmp_path / "hot.json"
    made_with, other = ExpertModel.open(paths[0]), ExpertModel.open(paths[2])
    profile.save(path, made_with, scores(made_with))
    with pytest.raises(ProfileError, match=r"hot\.json.*another model \(one\.gguf\)"):
        profile.load(path, other)
    with pytest.raises(ProfileError, match="another model"):
        remember(other, profile=path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"name": "a\nb\x1b[31m"}))
    with pytest.raises(ProfileError, match=r"another model \(a b\[31m\)"):
        profile.load(path, other)


def broken(text):
    """Copies of the profile, each damaged in one way."""
    data = json.loads(text)
    first, *rest = data["hotness"]
    rows = [first[1:], *([value, *first[1:]] for value in (-1.0, "x", None, np.nan, 1e999))]
    changes = [{"hotness": each} for each in (rest, {"0": 1}, *([row, *rest] for row in rows))]
    changes += [{"format": "something else"}, {"version": 99}, {"model": 7}, {"name": None}]
    changed = [json.dumps({**data, **each}).encode() for each in changes]
    return [b"", text[: len(text) // 2].encode(), b"[]", b"\xff\xfe", b"[" * 100_000, *changed]


def test_damaged_profiles_are_named(model, tmp_path):
    path = tmp_path / "hot.json"
    profile.save(path, model, scores(model))
    for damaged in broken(path.read_text()):
        path.write_bytes(damaged)
        with pytest.raises(ProfileError, match=r"hot\.json is "):
            profile.load(path, model)
        with pytest.raises(ProfileError, match=r"hot\.json is "):
            remember(model, profile=path)


def test_reading_takes_no_more_memory_than_the_file(model, tmp_path):
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


def test_a_damaged_cache_is_ignored_with_a_note(model):
    path = profile.cached_path(model)
    profile.save(path, model, scores(model))
    kept = remember(model, remember=True)
    assert kept.note is None
    np.testing.assert_allclose(kept.recall(), scores(model), rtol=1e-5)
    path.write_text("{")
    fresh = remember(model, remember=True)
    assert fresh.recall() is None
    assert str(path) in fresh.note
    fresh.learn(scores(model))
    fresh.save()
    assert remember(model, remember=True).note is None


def test_nothing_is_saved_without_remember(model, user_folder):
    quiet = remember(model)
    quiet.learn(scores(model))
    quiet.save()
    assert not profile.cached_path(model).exists()
    unused = remember(model, remember=True)
    unused.learn(np.zeros((model.n_layers, model.n_expert)))
    unused.save()
    assert not profile.cached_path(model).exists()


def test_a_new_profile_is_made(model, tmp_path):
    path = tmp_path / "new.json"
    memory = remember(model, profile=path)
    assert memory.recall() is None
    memory.learn(scores(model))
    memory.save()
    np.testing.assert_allclose(profile.load(path, model), scores(model), rtol=1e-5)
    with pytest.raises(ProfileError, match="no such folder"):
        remember(model, profile=tmp_path / "nowhere" / "new.json")


def test_a_failed_write_leaves_the_old_profile(model, tmp_path, monkeypatch):
    path = tmp_path / "hot.json"
    profile.save(path, model, scores(model))
    before = path.read_bytes()

    def full(*_):
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
            memory.save()  # errors of writing the cache are ignored


def test_tuned_values_are_kept_for_the_next_start(paths):
    """Tuned values are kept by policy and model in the user cache, if `remember` is set. Damaged
    files are ignored."""
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


@pytest.mark.parametrize(("kind", "usual"), [("cache", ".cache"), ("state", ".local/state")])
@pytest.mark.parametrize("given", ["HOME/elsewhere", "", "relative", "~/x", None])
def test_the_user_folders(monkeypatch, tmp_path, kind, usual, given):
    """Relative paths in XDG variables are ignored. The build tool uses the same cache folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    name = f"XDG_{kind.upper()}_HOME"
    if given is None:
        monkeypatch.delenv(name)
    else:
        monkeypatch.setenv(name, given.replace("HOME", str(tmp_path)))
    expected = tmp_path / ("elsewhere" if given == "HOME/elsewhere" else usual) / "moe-edge"
    assert user_folder(kind) == expected
    if kind == "cache":
        assert cache_dir() == expected


@pytest.mark.parametrize(("umask", "shared"), [(0o002, 0o664), (0o077, 0o600)])
def test_modes_follow_the_umask_unless_a_file_is_private(tmp_path, umask, shared):
    before = os.umask(umask)
    try:
        write_whole(tmp_path / "shared", "")
        write_whole(tmp_path / "private", "", private=True)
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("shared", "private")]
    assert modes == [shared, 0o600]


def test_an_error_of_writing_names_the_file(tmp_path):
    """The error names the target and not the temporary file, also if the disk is full."""
    (tmp_path / "folder").mkdir()
    for target in (tmp_path / "folder", tmp_path / "none" / "x"):
        with pytest.raises(OSError) as caught, whole_file(target):
            pass
        assert caught.value.filename == str(target)
        with pytest.raises(OSError) as caught:
            check_target(target)
        assert caught.value.filename == str(target)
    target = tmp_path / "x"
    with pytest.raises(OSError) as caught, whole_file(target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert (caught.value.filename, caught.value.errno) == (str(target), errno.ENOSPC)
    with pytest.raises(OSError, match="other") as caught, whole_file(target):
        raise OSError(errno.EIO, "other", "another file")
    assert caught.value.filename == "another file"
    check_target(target)
    assert os.listdir(tmp_path) == ["folder"]


def test_files_get_their_names_together(tmp_path):
    """If one file cannot be written or the block fails, no file appears."""
    out = tmp_path / "out"
    out.mkdir()
    with whole_files(out, "b") as made:
        for name in "abc":
            (made / name).write_text(name)
            assert os.listdir(out) == []
    assert {path.name: path.read_text() for path in out.iterdir()} == {x: x for x in "abc"}
    assert not made.exists()
    other = tmp_path / "other"
    (other / "z").mkdir(parents=True)
    with pytest.raises(OSError, match="directory"), whole_files(other, "b") as made:
        for name in "bz":
            (made / name).write_text(name)
    with pytest.raises(KeyboardInterrupt), whole_files(other, "b") as made:
        (made / "b").write_text("b")
        raise KeyboardInterrupt
    assert os.listdir(other) == ["z"]
    assert not made.exists()


def test_an_interrupt_leaves_all_of_the_files_or_none(tmp_path, monkeypatch):
    """An interrupt during the first rename completes all renames. An earlier interrupt leaves no
    file."""
    rename = os.replace

    def press_after(part, path):
        rename(part, path)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(os, "replace", press_after)
    for pressed_before, left in ((False, {"a", "z"}), (True, set())):
        out = tmp_path / str(pressed_before)
        out.mkdir()
        with contextlib.suppress(KeyboardInterrupt), interrupts.listening():
            interrupts.declare_last_file(out / "z")
            with whole_files(out, "z") as made:
                for name in "az":
                    (made / name).write_text("")
                if pressed_before:
                    signal.raise_signal(signal.SIGINT)
        assert set(os.listdir(out)) == left
