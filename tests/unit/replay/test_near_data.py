"""The hardware model of a GPU with near-data memory, compared with sums by hand, and its inputs."""

from dataclasses import replace

import numpy as np
import pytest
from traces import make_trace, random_trace

from orchestrator.errors import ConfigError, TraceError
from orchestrator.events import Phase
from orchestrator.lab.replay import near_data
from orchestrator.lab.replay.near_data import (
    GPU_LRU_BITS,
    SHAPES,
    NearData,
    Plan,
    Routing,
    Sequence,
    cosine,
    decode,
    from_trace,
    generated,
    near_tables,
    on_demand,
    replay_near_data,
    strategies,
)

SMALL, LARGE = SHAPES["mixtral-8x7b"], SHAPES["mixtral-8x22b"]


def independent(shape, n_hot, hot_mass, n=400):
    """A sequence whose tokens choose two experts independently, each hot with the probability
    hot_mass, in exact proportions. The first n_hot experts are hot."""
    both, one = round(n * hot_mass**2), round(2 * n * hot_mass * (1 - hot_mass))
    pairs = [(0, 1)] * both + [(0, n_hot)] * one + [(n_hot, n_hot + 1)] * (n - both - one)
    ids = np.repeat(np.array(pairs)[:, None, :], shape.n_layers, axis=1)
    counts = np.zeros((shape.n_layers, shape.n_expert))
    counts[:, :n_hot] = 1.0
    return Sequence(counts, counts, ids)


def step_ms(shape, n_hot, hot_mass, bits):
    hot = np.zeros((shape.n_layers, shape.n_expert), bool)
    hot[:, :n_hot] = True
    plan = Plan(hot, np.full(hot.shape, float(bits)))
    return decode(shape, plan, independent(shape, n_hot, hot_mass)).step_ms


# ms per token by hand: (shape, hot experts, hot mass, bits, ms).
CLOSED_FORM = [
    (SMALL, 0, 0.0, 16, 44.8),
    (SMALL, 4, 0.5, 16, 24.6),
    (SMALL, 4, 0.5, 3, 6.71),
    (SMALL, 4, 0.5, 2, 5.58),
    (SMALL, 4, 0.7, 16, 17.4),
    (SMALL, 4, 0.7, 3, 6.64),
    (SMALL, 4, 0.7, 2, 6.02),
    (LARGE, 0, 0.0, 16, 135.1),
    (LARGE, 2, 0.25, 16, 103.5),
    (LARGE, 2, 0.25, 3, 23.0),
    (LARGE, 2, 0.25, 2, 17.4),
]


@pytest.mark.parametrize(("shape", "n_hot", "mass", "bits", "ms"), CLOSED_FORM)
def test_decode_steps_equal_the_closed_form(shape, n_hot, mass, bits, ms):
    assert step_ms(shape, n_hot, mass, bits) == pytest.approx(ms, rel=0.006)


def test_time_of_an_expert_follows_its_bytes_or_products(monkeypatch):
    assert SMALL.expert_bytes() == pytest.approx(352.3e6, rel=1e-3)
    near = [SMALL.near_ms(bits) for bits in (16, 3, 2)]
    assert near == pytest.approx([0.688, 0.129, 0.086], rel=0.005)
    assert SMALL.gpu_ms() == pytest.approx(0.105, rel=0.005)
    assert SMALL.move_ms == pytest.approx(14.1, rel=0.005)
    assert SMALL.near_ms(16, 100) == pytest.approx(17.2, rel=0.005)
    # 64 arrays of 4 x 4 at 1 GHz multiply 176 million weights in 0.172 ms, and for four tokens in
    # 0.688 ms.
    monkeypatch.setattr(near_data, "NEAR_BYTES_PER_S", 1e15)
    assert SMALL.near_ms() == pytest.approx(0.172, rel=0.005)


def test_prompts_stream_or_compute_whichever_is_faster():
    """With 512 tokens an expert gets 128: 14.1 ms over the link or 22 ms near its memory, both in
    parallel. The faster schedule is chosen."""
    tokens = np.full(8, 128.0)
    nothing, half = np.zeros(8, bool), np.arange(8) < 4
    took, streamed = SMALL.prompt_layer_ms(tokens, nothing, 512)
    assert took == pytest.approx(5 * 14.1, rel=0.01) and streamed.sum() == 5
    took, streamed = SMALL.prompt_layer_ms(tokens, half, 512)
    assert took == pytest.approx(3 * 14.1, rel=0.01) and streamed.sum() == 3
    assert not streamed[half].any()


PAPER = NearData(near_weights="plain", prior_tokens=0.0)


def runs_of(shape, n_hot, mass, bits):
    sequence = independent(shape, n_hot, mass, 16)
    routing = Routing("by hand", [sequence, sequence], np.zeros_like(sequence.counts))
    return strategies(replace(PAPER, shape=shape.name, near_bits=bits), routing)


@pytest.mark.parametrize(
    ("shape", "n_hot", "mass", "bits", "over_near", "over_monde"),
    [
        (SMALL, 4, 0.5, 3.0, 6.7, 8.7),
        (SMALL, 4, 0.5, 2.0, 8.0, 11.2),
        (LARGE, 2, 0.25, 3.0, 5.9, 8.9),
        (LARGE, 2, 0.25, 2.0, 7.8, 11.5),
    ],
)
def test_speedups_over_near_only_and_over_monde_with_its_fitted_rate(
    shape, n_hot, mass, bits, over_near, over_monde
):
    """over_near is computed by hand. over_monde is the paper's Figure 6. One migration rate is
    fitted to it for both widths of a shape, so its tolerance of 10 % confirms nothing."""
    runs = runs_of(shape, n_hot, mass, bits)
    ours = runs["context"]
    only = runs["near-only"].mean("step_ms")
    assert only / ours.mean("step_ms") == pytest.approx(over_near, rel=0.02)
    assert runs["monde"].mean("step_ms") / ours.mean("step_ms") == pytest.approx(
        over_monde, rel=0.1
    )


def test_a_gpu_alone_copies_missing_experts_once_per_prompt():
    """The GPU holds 218 of 256 experts. Copying the others takes longer than computing all."""
    runs = runs_of(SMALL, 4, 0.5, 3.0)
    missing = 256 - (80e9 - 2 * 1.6e9) / SMALL.expert_bytes()
    for name in ("gpu-lru", "hobbit"):
        assert runs[name].prompts[0] == pytest.approx(3 * [missing * 14.09 + 32 * 0.025], rel=0.01)


# (hot experts of each sequence, usual experts, experts that each sequence moves in a layer). A
# sequence starts with the experts of the previous one, the first with the usual ones, or with the
# first experts if nothing is known.
MOVED = [
    ("only a prompt, other experts than are there", [(4, 5, 6, 7)], (), [4]),
    ("only a prompt, half of it usual", [(4, 5, 6, 7)], (2, 3, 4, 5), [2]),
    ("only a prompt, all of it usual", [(2, 3, 4, 5)], (2, 3, 4, 5), [0]),
    ("what the last one leaves is not there before", [(0, 1, 2, 3), (4, 5, 6, 7)], (), [0, 4]),
    ("one after the other", [(1, 2, 3, 4), (3, 4, 5, 6), (3, 4, 5, 6)], (), [1, 2, 0]),
]


@pytest.mark.parametrize(
    ("hot", "usual", "moved"), [case[1:] for case in MOVED], ids=[case[0] for case in MOVED]
)
def test_only_changed_experts_are_moved(hot, usual, moved, monkeypatch):
    def use(experts):
        counts = np.zeros((32, 8))
        counts[:, list(experts)] = 1.0
        return counts

    ids = independent(SMALL, 4, 0.5, 16).ids
    routing = Routing("", [Sequence(use(each), use(each), ids) for each in hot], use(usual))
    stream = 352321536 / 25e6  # 3 x 4096 x 14336 weights of 2 bytes at 25 GB/s, in ms
    monkeypatch.setattr(near_data, "LENGTHS", ((4, 8),))
    runs = strategies(PAPER, routing)
    # A prompt of four tokens streams no expert to the GPU.
    assert runs["context"].moves[:, 0] == pytest.approx([32 * n * stream for n in moved])
    assert not runs["static"].moves.any()  # placed once, before all sequences


def test_experts_streamed_by_a_prompt_stay_on_the_gpu(monkeypatch):
    sequence = independent(SMALL, 4, 0.5, 16)
    routing = Routing("", [sequence], np.roll(sequence.counts, 4, axis=1))
    monkeypatch.setattr(near_data, "LENGTHS", ((4, 8), (4096, 8)))
    short, long = strategies(PAPER, routing)["context"].moves[0]
    assert long < short / 2


def alone(shape, ids, n_slots, bits):
    """A GPU alone with n_slots experts. ids: experts of one layer, for each token."""
    ids = np.array(ids)[:, None, :]
    sequence = Sequence(np.zeros((1, 8)), np.zeros((1, 8)), ids)
    one_layer = replace(shape, n_layers=1)
    return on_demand(one_layer, [sequence], bits, n_slots + 0.01)


def test_gpu_lru_copies_missing_experts():
    there, copied = 0.0250 + 2 * 0.1052, 14.09 + 0.002
    kept = alone(SMALL, [(0, 1), (1, 0)], 2, GPU_LRU_BITS)
    assert kept.step_ms == pytest.approx(there, rel=1e-2) and kept.hot_mass == 1.0
    never = alone(SMALL, [(0, 1), (2, 3)], 2, GPU_LRU_BITS)
    assert never.step_ms == pytest.approx(there + 2 * copied, rel=1e-3) and never.hot_mass == 0.0
    # The least recently used expert is evicted: 0 and 1 stay, and 3 replaces 2.
    some = alone(SMALL, [(0, 1), (2, 0), (1, 0), (3, 0)], 3, GPU_LRU_BITS)
    assert some.hot_mass == pytest.approx(6 / 8)


def test_a_trace_is_tiled_and_its_last_layer_is_predicted():
    rng = np.random.default_rng(1)
    trace = random_trace(rng, n_layers=3)
    routing = from_trace(SMALL, trace)
    (sequence,) = routing.sequences
    assert sequence.counts.shape == (32, 8) and sequence.ids.shape == (11, 32, 2)
    assert (sequence.counts[3] == sequence.counts[0]).all()
    assert (sequence.ids[:, 31] == sequence.ids[:, 1]).all()
    prompt = next(trace.steps())
    predicted = np.bincount(prompt.events[1].ahead_ids[0].ravel(), minlength=8)
    assert sequence.counts[2].tolist() == predicted.tolist()
    assert sequence.decode_counts().sum() == 11 * 32 * 2


def test_traces_that_cannot_stand_for_the_shape_are_refused():
    one = [np.array([[0, 1]])]
    with pytest.raises(TraceError, match="no prompt with an answer"):
        from_trace(SMALL, make_trace([(Phase.DECODE, one)]))
    with pytest.raises(ConfigError, match=r"cannot be mapped to .* uses 2 of 12 experts"):
        from_trace(SMALL, make_trace([(Phase.PREFILL, one)], n_expert=12))


def test_generated_routing_has_the_papers_similarity():
    made = generated(SMALL)
    found = [cosine(each.counts, each.decode_counts()).mean() for each in made.sequences]
    assert np.mean(found) == pytest.approx(0.89, abs=0.05)
    ids = made.sequences[0].ids
    assert (ids[..., 0] != ids[..., 1]).all() and made.sequences[0].counts.sum() == 128 * 32 * 2
    assert (generated(SMALL).sequences[0].ids == ids).all()


def test_a_trace_or_generated_routing_goes_through_every_strategy():
    asked = NearData(near_bits=2.0)
    found = replay_near_data(asked, random_trace(np.random.default_rng(3), n_steps=6))
    assert set(found["runs"]) == {"near-only", "monde", "static", "context", "gpu-lru", "hobbit"}
    assert found["routing"] == "trace of the model made up, 1 sequences with 5 decoded tokens"
    found = replay_near_data(NearData(shape="mixtral-8x22b"), None)
    assert found["n_hot"] == 2 and found["runs"]["monde"]["over_monde"] == 1.0


def test_the_tables_lead_with_what_is_not_fitted():
    for table in near_tables(replay_near_data(NearData(), None)):
        heads = table.headings
        assert heads.index("x near-only") < heads.index("x monde (fitted)")


def test_end_to_end_times_are_compared_with_both_bases():
    runs = replay_near_data(NearData(), None)["runs"]
    assert len(runs["context"]["lengths"]) == len(near_data.LENGTHS)
    for name, base in (("over_near_only", "near-only"), ("over_monde", "monde")):
        for ours, theirs in zip(runs["context"]["lengths"], runs[base]["lengths"], strict=True):
            assert ours[name] == pytest.approx(theirs["total_ms"] / ours["total_ms"])
            parts = ours["prompt_ms"] + ours["migration_ms"]
            steps = ours["answer"] * runs["context"]["step_ms"]
            assert ours["total_ms"] == pytest.approx(parts + steps)


@pytest.mark.parametrize(
    ("hot", "message"),
    [(7, r"GPU \(80 GB\) holds at most 6 experts"), (9, "mixtral-8x7b has 8 experts per layer")],
)
def test_more_hot_experts_than_fit_are_refused(hot, message):
    with pytest.raises(ConfigError, match=message):
        NearData(hot=hot)
