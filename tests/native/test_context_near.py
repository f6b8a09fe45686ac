"""Context-aware placement over four near tiers: shared slots, losses, moves, kept prefixes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep

import numpy as np
import pytest

from gguf_tools import synthetic
from gguf_tools.experts import ExpertModel
from gguf_tools.pack import pack
from orchestrator.config import Config
from orchestrator.cost import losses
from orchestrator.engine.engine import Engine
from orchestrator.errors import ConfigError
from orchestrator.lab.replay import ReplayOptions, Trace, read_trace, replay, write_trace
from orchestrator.lab.replay.record import Disk, Recorder
from orchestrator.lab.replay.report import set_up_for
from orchestrator.lab.replay.simulate import Compute, Transport, simulate
from orchestrator.native.llama import Bindings
from orchestrator.policy.context import ContextAware

from .replayed import replayed_exactly
from .transition_driver import HANG_S

pytestmark = pytest.mark.usefixtures("library_folder")

FIVE = ("q8_0", "q4_k", "q3_k", "q2_k", "q1_0")
RNG = np.random.default_rng(17)
PROMPTS = [[int(t) for t in RNG.integers(0, 250, n)] for n in (40, 25)]
ANSWER = [int(t) for t in RNG.integers(0, 250, 60)]


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("five")
    source = synthetic.write(folder / "source.gguf", "tiny-qwen3moe", tiers=("f16",))
    pack(source, folder / "five.gguf", FIVE)
    return folder / "five.gguf"


def save_table(path: Path, of: Path, tiers: tuple[str, ...] = FIVE) -> np.ndarray:
    """A loss table of random numbers, worse in lower tiers; returns the losses."""
    with ExpertModel.open(of) as model:
        size = model.n_layers, model.n_expert
        found = np.sort(RNG.random((*size, len(tiers))) ** 4, axis=2).round(6)
        table = losses.LossTable(
            [losses.TablePrecision(name, 4.0, True) for name in tiers],
            found,
            np.ones(size),
            np.ones(size, np.int64),
            "none",
            "rtn",
            "random",
            1,
        )
        losses.save(path, model, table)
    return found


def build(model: Path, **options: object) -> Config:
    asked = {"policy": "context", "hot_experts": 2, "ctx": 256, "near_slots": "shared"} | options
    return Config.build(model=model, threads=1, **asked)


def converse(engine: Engine, number: int, n_answer: int = len(ANSWER)) -> None:
    prompt = PROMPTS[number]
    engine.eval(prompt, 0)
    for at, token in enumerate(ANSWER[:n_answer]):
        engine.eval([token], len(prompt) + at)


def policy_of(engine: Engine) -> ContextAware:
    assert isinstance(engine.policy, ContextAware)
    return engine.policy


def until_placed(engine: Engine) -> None:
    """However slow the disk is, with few tokens: what they use would be placed for, too."""
    end, at = monotonic() + HANG_S, len(engine._steps.cached)
    while policy_of(engine)._wanted is not None:
        while (np.not_equal(*engine.store.states()) & ~engine.store.landed()).any():
            assert monotonic() < end, "a transition does not arrive"
            sleep(0.001)
        assert monotonic() < end, "the experts are never placed"
        engine.eval([1], at)


def test_a_loss_table_is_found_and_used(five: Path, tmp_path: Path) -> None:
    beside = losses.default_path(five)
    with Engine.open(build(five)) as engine:
        assert policy_of(engine).losses is None
        assert "there is no loss table" in str(engine.note) and "calibrate" in str(engine.note)
        nominal = engine.store.resident()
    with Engine.open(build(five, near_slots="own")) as engine:
        assert engine.note is None  # no table could change where experts are
        in_own_slots = engine.store.resident()
    try:
        expected = save_table(beside, five)
        with Engine.open(build(five)) as engine:
            assert np.array_equal(policy_of(engine).losses, expected) and engine.note is None
            assert not np.array_equal(engine.store.resident(), nominal)
        with Engine.open(build(five, near_slots="own")) as engine:
            assert policy_of(engine).losses is None and engine.note is None
            assert np.array_equal(engine.store.resident(), in_own_slots)
        save_table(beside, five, FIVE[:3])
        with Engine.open(build(five)) as engine:
            assert policy_of(engine).losses is None and "lacks one of" in str(engine.note)
        beside.write_text("{}")
        with Engine.open(build(five)) as engine:
            assert policy_of(engine).losses is None and "Nominal losses" in str(engine.note)
    finally:
        beside.unlink()
    named = tmp_path / "losses.json"
    with pytest.raises(ConfigError, match="cannot be read"):
        Engine.open(build(five, losses=named))
    save_table(named, five, FIVE[:3])
    with pytest.raises(ConfigError, match=r"--losses .* lacks one of"):
        Engine.open(build(five, losses=named))
    expected = save_table(named, five)
    with Engine.open(build(five, losses=named, near_tiers="q3_k,q1_0", near_bits=2.0)) as engine:
        assert np.array_equal(policy_of(engine).losses, expected)


@pytest.mark.parametrize("placement", ["async", "wait"])
def test_moves_read_what_changed_and_nothing_waits(five: Path, placement: str) -> None:
    """Where it waits, everything is in place before an answer's first token."""
    with Engine.open(build(five, placement=placement)) as engine:
        policy, store = policy_of(engine), engine.store
        model = engine.model
        converse(engine, 0)
        until_placed(engine)
        for number in (1, 0):
            before, read = store.resident(), store.stats().transition_bytes
            told = policy.report()["changed_bytes"]
            converse(engine, number, 1)
            at_once = store.stats().transition_bytes - read
            for token in ANSWER[1:]:
                engine.eval([token], len(engine._steps.cached))
            until_placed(engine)
            after, stats = store.resident(), store.stats()
            changed = np.argwhere(before != after).tolist()
            owed = sum(
                kind[after[layer, expert]].expert_bytes
                for layer, expert in changed
                for kind in model.slices[layer]
                if kind[0] is not None
            )
            slots = [policy.shape.expert_slot_bytes(at, after[at, e]) for at, e in changed]
            assert policy.report()["changed_bytes"] - told == sum(slots)
            moved = stats.transition_bytes - read
            assert changed and 0 < moved <= 1.1 * owed
            assert placement == "async" or at_once == moved
            store.check()
        assert policy.updates == 3
        assert placement == "wait" or policy.report()["most_steps"] > 0
        assert list(stats.demand_bytes) == list(stats.wait_us) == [0, 0]
        assert list(stats.hits) == list(stats.requests)
        assert stats.transitions_rejected == stats.transitions_failed == 0
        assert stats.evictions == 0


def converse_twice(engine: Engine) -> None:
    for number in (0, 1):
        converse(engine, number)
        until_placed(engine)


def recorded(
    config: Config, path: Path, talk: Callable[[Engine], None] = converse_twice
) -> tuple[Trace, int]:
    """The trace, and how many experts changed in the run."""
    with Engine.open(config) as engine:
        with Recorder(engine) as recorder:
            talk(engine)
        stats = engine.store.stats()
        trace = recorder.trace(Disk(10**9, 50))
    write_trace(path, trace)
    return read_trace(path), stats.experts_promoted + stats.experts_demoted


@pytest.mark.parametrize("placement", ["async", "wait"])
def test_its_replay_is_exact_with_shared_slots(five: Path, tmp_path: Path, placement: str) -> None:
    table = tmp_path / "losses.json"
    expected = save_table(table, five)
    config = build(five, placement=placement, losses=table, ubatch=16)
    trace, n_changed = recorded(config, tmp_path / "t.npz")
    assert np.array_equal(trace.arrays["losses"], expected)
    assert n_changed > 0 and len(np.unique(trace.arrays["published"][:, 3])) > 2
    if placement == "wait":  # all of it before the two answers
        assert len(np.unique(trace.arrays["published"][:, 0])) == 2
    replayed_exactly(trace)


@pytest.mark.parametrize("placement", ["async", "wait"])
def test_its_replay_knows_sequences_and_kept_tokens(
    five: Path, tmp_path: Path, placement: str
) -> None:
    """Two forks of a conversation decode together, one of them is dropped, and the first prompt is
    brought back from a copy and goes on."""
    known: list[np.ndarray] = []

    def talk(engine: Engine) -> None:
        converse(engine, 0, 3)
        kept = engine.driver.save_sequence(0)
        assert kept is not None
        engine.eval(PROMPTS[1], len(engine._steps.cached))
        engine.fork(0)
        engine.fork(1)
        for token in ANSWER[:20]:
            engine.decode_batch([token, token + 1], [0, 1])
        converse(engine, 1, 5)
        engine.fork(1)  # what it held is over
        engine.decode_batch([9], [1])
        engine.reset()  # all three are
        converse(engine, 0, 2)
        engine.driver.restore_sequence(0, kept)
        engine.eval(PROMPTS[0][:9], len(engine._steps.cached))
        for token in ANSWER[:30]:
            engine.eval([token], len(engine._steps.cached))
        until_placed(engine)
        policy = policy_of(engine)
        known.extend([*policy.use.sums, policy.use.past])

    config = build(five, sequences=2, placement=placement)
    trace, n_changed = recorded(config, tmp_path / "t.npz", talk)
    assert n_changed > 0 and set(trace.arrays["sequences"].tolist()) == {0, 1, 2}
    assert len(trace.restored()) == 3  # the two forks together, the third, the copy
    replayed_exactly(trace)
    setup = set_up_for(trace, ReplayOptions(), ContextAware, Transport(0, 0, 4))
    clock = Transport(10**9, 50, 4), Compute(1000.0, 1000.0)
    simulate(Bindings.load().library(), trace, setup, *clock, as_recorded=True)
    assert isinstance(setup.policy, ContextAware)
    use = setup.policy.use
    for mine, its in zip((*use.sums, use.past), known, strict=True):
        assert mine == pytest.approx(its, rel=1e-6)
    # A policy that knows nothing of sequences plays it too.
    replay(Bindings.load().library(), trace, ReplayOptions(policy="lru", expert_ram=1 << 22))


def test_it_adapts_within_64_steps(five: Path, tmp_path: Path) -> None:
    """In virtual time, with a token's computing and bytes as they are for OLMoE: 30 ms, and what
    changes takes a third of a second at 1.25 GB/s."""
    trace, _ = recorded(build(five), tmp_path / "t.npz")
    for hot in (2, 4):
        options = ReplayOptions(settings={"hot_experts": hot, "near_bits": 2.5}, expert_ram=1 << 26)
        setup = set_up_for(trace, options, ContextAware, Transport(0, 0, 4))
        shape = setup.shape
        every = shape.all_slot_bytes(1)
        speed = Transport(int(every / 1.5), 100, 4)  # all experts in 1.5 s, as 1.9 GB are
        simulate(Bindings.load().library(), trace, setup, speed, Compute(1000.0, 30_000.0), False)
        found = setup.policy.report()
        assert found["placements"] == 2 and 0 < found["steps"] <= 64


def test_what_a_sequence_used_goes_with_its_tokens(five: Path) -> None:
    with Engine.open(build(five, sequences=2)) as engine:
        policy, driver = policy_of(engine), engine.driver
        converse(engine, 0, 4)
        alone = policy.use.sums[0]
        kept = driver.save_sequence(0)
        assert kept is not None and driver.save_sequence(1) is None
        engine.fork(0)  # llama.cpp's 1
        assert driver.save_sequence(1) == kept
        engine.decode_batch([5], [0])
        assert policy.use.sums[0].sum() == pytest.approx(2 * alone.sum() + alone.sum() * 1 / 44)
    with Engine.open(build(five)) as engine:
        converse(engine, 0, 2)
        engine.driver.restore_sequence(0, kept)
        assert policy_of(engine).use.sums[0] == pytest.approx(alone)
