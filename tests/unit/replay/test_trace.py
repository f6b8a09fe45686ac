"""The trace file: reading returns what was written, and any other file is refused in one
sentence."""

import io
import json
import zipfile
from dataclasses import asdict

import numpy as np
import pytest
from traces import decode, random_trace

from orchestrator.errors import TraceError
from orchestrator.events import Phase
from orchestrator.lab.replay import read_trace, write_trace
from orchestrator.lab.replay.trace import EARLIER, FORMAT, VERSION
from orchestrator.native import MAX_TIERS
from orchestrator.policy import policy_class


def written(path, arrays, header):
    """Write a file with these arrays and this header, without checks."""
    raw = np.frombuffer(json.dumps(header).encode(), np.uint8)
    np.savez_compressed(path, header=raw, **arrays)
    return path


def header_of(trace):
    return {"format": FORMAT, **asdict(trace.header)}


def test_read_back(tmp_path):
    trace = random_trace(np.random.default_rng(0))
    write_trace(tmp_path / "t.npz", trace)
    found = read_trace(tmp_path / "t.npz")
    assert found.header == trace.header
    assert set(found.arrays) == set(trace.arrays)
    for name, array in trace.arrays.items():
        np.testing.assert_array_equal(found.arrays[name], array, err_msg=name)
        assert found.arrays[name].dtype == array.dtype
    assert [path.name for path in tmp_path.iterdir()] == ["t.npz"]


def test_steps_have_their_own_events():
    trace = random_trace(np.random.default_rng(1), n_steps=4)
    steps = list(trace.steps())
    assert [step.phase for step in steps] == [Phase.PREFILL] + 3 * [Phase.DECODE]
    assert [step.n_tokens for step in steps] == [3, 1, 1, 1]
    assert [event.layer for event in steps[2].events] == [0, 1, 2]
    assert [event.ids.shape for event in steps[0].events] == 3 * [(3, 2)]
    assert [event.ahead_ids.shape for event in steps[0].events] == [(1, 3, 2), (1, 3, 2), (0, 3, 2)]
    assert [event.importance is None for step in steps for event in step.events] == (
        3 * [False] + 9 * [True]
    )
    assert [event.importance.shape for event in steps[0].events] == 3 * [(3,)]
    joined = np.concatenate([event.ids for step in steps for event in step.events])
    np.testing.assert_array_equal(joined, trace.arrays["ids"])


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "t.npz"
    path.write_bytes(b"precious")

    def full(file, **_arrays):
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.raises(TraceError, match=r"t\.npz: cannot be written: No space left"):
        write_trace(path, random_trace(np.random.default_rng(0)))
    assert path.read_bytes() == b"precious"
    assert list(tmp_path.iterdir()) == [path]


def test_not_a_trace(tmp_path):
    with pytest.raises(TraceError, match=r"none\.npz: cannot be read: No such file"):
        read_trace(tmp_path / "none.npz")
    with pytest.raises(TraceError, match="cannot be read: Is a directory"):
        read_trace(tmp_path)
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(TraceError, match=r"model\.gguf: this file is not a trace"):
        read_trace(model)
    np.savez(tmp_path / "other.npz", a=np.zeros(3))
    with pytest.raises(TraceError, match=r"other\.npz: this \.npz file is not a trace"):
        read_trace(tmp_path / "other.npz")
    with pytest.raises(TraceError, match="file is not a trace: its header has another format"):
        read_trace(written(tmp_path / "foreign.npz", {}, {"format": "another"}))


def test_no_pickle_is_loaded(tmp_path):
    class Bad:
        def __reduce__(self):
            return pytest.fail, ("a pickle was loaded",)

    trace = random_trace(np.random.default_rng(0))
    odd = np.empty(1, object)
    odd[0] = Bad()
    path = written(tmp_path / "t.npz", trace.arrays | {"ids": odd}, header_of(trace))
    with pytest.raises(TraceError, match="the file is damaged: Object arrays"):
        read_trace(path)


@pytest.mark.parametrize("share", [0.05, 0.3, 0.6, 0.9, 0.999])
def test_a_truncated_file(tmp_path, share):
    path = tmp_path / "t.npz"
    write_trace(path, random_trace(np.random.default_rng(0)))
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(TraceError, match=r"t\.npz: "):
        read_trace(path)


def test_a_flipped_byte_is_an_error_or_does_no_harm(tmp_path):
    path = tmp_path / "t.npz"
    trace = random_trace(np.random.default_rng(0))
    write_trace(path, trace)
    whole = path.read_bytes()
    rng, refused = np.random.default_rng(5), 0
    for at in rng.integers(0, len(whole), 200).tolist():
        damaged = bytearray(whole)
        damaged[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        try:
            found = read_trace(path)
        except TraceError as error:
            assert str(path) in str(error)
            refused += 1
        else:  # in zip fields without an effect, such as dates
            np.testing.assert_array_equal(found.arrays["ids"], trace.arrays["ids"])
    assert refused > 100


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        (
            "version",
            VERSION + 1,
            f"version {VERSION + 1} is not supported, only versions 8 and {VERSION} are: ",
        ),
        ("n_expert", 0, "n_expert is 0"),
        ("n_expert", True, "n_expert is True"),
        ("n_expert_used", 9, "a token uses 9 experts, but a layer has only 8"),
        ("layer_ids", [], "layer_ids is []"),
        ("layer_ids", [0, 1, 2, 3], "slices has the shape"),
        ("tiers", ["a"] * (MAX_TIERS + 1), "tiers is "),
        ("policy", "other", "unknown policy 'other'"),
        ("in_use", ["q2_k", "q4_k"], "in_use is ['q2_k', 'q4_k']"),
        ("in_use", ["q3_k"], "in_use is ['q3_k']"),
        ("rules", {"skip": 1}, "rules is {'skip': 1}"),
        ("settings", [], "settings is []"),
        ("settings", {"retention": 1.0}, "or has unknown settings: retention"),
        ("expert_bytes", -1, "expert_bytes is -1"),
        ("read_latency_us", 0.5, "read_latency_us is 0.5"),
        ("dense_share", [0.5], "dense_share is [0.5]"),
        ("surplus", 1, "it lacks fields or has unknown fields: surplus"),
        ("a\nb\x1b", 1, "it lacks fields or has unknown fields: a b"),
    ],
)
def test_a_wrong_header(tmp_path, field, value, said):
    trace = random_trace(np.random.default_rng(0))
    path = written(tmp_path / "t.npz", trace.arrays, header_of(trace) | {field: value})
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert said in str(caught.value) and str(path) in str(caught.value)


def test_the_name_of_the_model_is_shown_in_one_line(tmp_path):
    trace = random_trace(np.random.default_rng(0))
    header = header_of(trace) | {"model": "a\nb\x1b[31m"}
    found = read_trace(written(tmp_path / "t.npz", trace.arrays, header))
    assert found.header.model == "a b[31m"


def test_the_version_before_is_read(tmp_path):
    """A trace of the previous version is read. Its additional arrays are ignored, whatever they
    contain."""
    trace = random_trace(np.random.default_rng(0))
    arrays = trace.arrays | {name: np.zeros(3) for name in EARLIER}
    found = read_trace(written(tmp_path / "t.npz", arrays, header_of(trace) | {"version": 8}))
    assert found.header == trace.header and found.arrays.keys() == trace.arrays.keys()
    with pytest.raises(TraceError, match="it lacks arrays or has unknown arrays: ahead_held, "):
        read_trace(written(tmp_path / "u.npz", arrays, header_of(trace)))


@pytest.mark.parametrize(
    ("policy", "field", "value", "said"),
    [
        ("dymoe", "retention", 2, "'retention' must be 0.0 to 1.0, not 2"),
        ("dymoe", "prefetch", None, "'prefetch' must be str, not None"),
        ("dynaexq", "hot_experts", True, "'hot_experts' must be int, not True"),
    ],
)
def test_a_wrong_setting(tmp_path, policy, field, value, said):
    trace = random_trace(np.random.default_rng(0))
    settings = policy_class(policy).Settings().as_dict()
    header = header_of(trace) | {"policy": policy, "settings": settings}
    assert read_trace(written(tmp_path / "t.npz", trace.arrays, header)).header.policy == policy
    header["settings"] = settings | {field: value}
    with pytest.raises(TraceError) as caught:
        read_trace(written(tmp_path / "t.npz", trace.arrays, header))
    assert said in str(caught.value) and "header is damaged" in str(caught.value)


def changed(name, index, value):
    def change(arrays):
        array = arrays[name].copy()
        array[index] = value
        arrays[name] = array

    return change


WRONG = [
    (lambda a: a.pop("ids"), "it lacks arrays or has unknown arrays: ids"),
    (lambda a: a.update(more=np.zeros(1)), "it lacks arrays or has unknown arrays: more"),
    (
        lambda a: a.update(ids=a["ids"].astype(np.int64)),
        "the array ids has the wrong type or number of dimensions: int64, 2",
    ),
    (lambda a: a.update(ids=a["ids"][:-1]), "ids has the shape"),
    (lambda a: a.update(counters=a["counters"][:, 1:]), "counters has the shape"),
    (changed("marks", (0, 0), 99), "marks, column 0, has a value"),
    (changed("marks", (0, 1), 3), "marks, column 1, has a value"),
    (
        lambda a: a.update(marks=np.array([[2, 0, 0], [1, 0, 0]], np.int32)),
        "array 'marks' is not sorted",
    ),
    (lambda a: a.update(restored=np.array([[-1, 0, 0]], np.int32)), "restored, column 0, has"),
    (
        lambda a: a.update(restored=np.array([[0, 0, 9]], np.int32)),
        "the sum of the sizes in its array 'restored'",
    ),
    (lambda a: a.update(restored=np.array([[0, 0, -1]], np.int32)), "restored, column 2, has"),
    (
        lambda a: a.update(restored_use=np.zeros(9, np.uint8)),
        "the sum of the sizes in its array 'restored'",
    ),
    (changed("costs", (0, 0, 0), -1.0), "costs has a value outside the range 0 to"),
    (changed("start_hotness", (0, 0), np.nan), "start_hotness has a value outside the range 0 to"),
    (changed("losses", (0, 0, 0), -1), "losses has a value outside the range 0 to"),
    (changed("counters", (0, 0), -1), "counters has a value"),
    (changed("event_computed", 0, 9), "event_computed has a value outside the range 0 to 8"),
    (lambda a: a.update(importance=a["importance"][1:]), "importance has the shape"),
    (changed("event_scored", 0, 2), "importance has the shape"),
    (changed("importance", 0, np.inf), "importance has a value"),
    (changed("ids", (0, 0), 8), "ids has a value outside the range 0 to 7"),
    (changed("ids", 0, 3), "array ids names an expert twice"),
    (changed("ahead_ids", 0, 3), "array ahead_ids names an expert twice"),
    (changed("weights", (0, 1), np.nan), "weights has a value"),
    (changed("step_phase", 0, 2), "step_phase has a value"),
    (changed("event_ns", 0, -1), "event_ns has a value"),
    (changed("event_wait_us", 0, -1), "event_wait_us has a value"),
    (changed("event_ns", 0, 2**60), "event_ns has a value"),
    (changed("event_step", 0, 5), "not sorted by step"),
    (changed("event_layer", 0, 3), "event_layer has a value"),
    (changed("event_layer", 1, 0), "not sorted by step and layer"),
    (changed("step_tokens", 0, 2), "a layer computes more tokens (array 'event_tokens')"),
    (changed("phases", 0, 2), "phases has a value"),
    (changed("phases", -1, 0), "array 'phases', a decode step has a prefill token"),
    (changed("slices", (0, 3, 0, 0), -1), "a layer lacks a matrix"),
    (changed("slices", (0, 3, 0, 0), 1), "slices, column 0, has a value"),
    (changed("slices", (0, 3, 0, 2), 0), "array 'slices', a matrix has no bytes"),
    (changed("slices", (0, 3, 0, 2), 2**61), "slices, column 2, has a value"),
    (changed("slices", (0, 3, 0, 1), -4096), "slices, column 1, has a value"),
    (changed("slices", (0, 3, 0, 3), -1), "slices, column 3, has a value"),
]


@pytest.mark.parametrize(("change", "said"), WRONG)
def test_wrong_arrays(tmp_path, change, said):
    trace = random_trace(np.random.default_rng(0))
    arrays = dict(trace.arrays)
    change(arrays)
    path = written(tmp_path / "t.npz", arrays, header_of(trace))
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert said in str(caught.value) and str(path) in str(caught.value)


def test_an_event_beyond_the_last_layer(tmp_path):
    trace = random_trace(np.random.default_rng(0))
    ahead = trace.arrays["event_ahead"].copy()
    ahead[1], ahead[2] = 0, 1  # layers 1 and 2 of 3, with the same sum
    path = written(tmp_path / "t.npz", trace.arrays | {"event_ahead": ahead}, header_of(trace))
    with pytest.raises(TraceError, match="predicts experts beyond the last layer"):
        read_trace(path)


def test_a_trace_without_steps(tmp_path):
    trace = decode([[0, 1]])
    kept = ("slices", "start_hotness", "losses", "costs", "counters")
    empty = {name: array if name in kept else array[:0] for name, array in trace.arrays.items()}
    with pytest.raises(TraceError, match="has no steps"):
        read_trace(written(tmp_path / "t.npz", empty, header_of(trace)))


def test_a_file_that_would_unpack_to_far_more_is_refused(tmp_path):
    trace = random_trace(np.random.default_rng(0))
    arrays = trace.arrays | {"step_phase": np.zeros(1 << 22, np.int64)}
    path = written(tmp_path / "t.npz", arrays, header_of(trace))
    assert path.stat().st_size < 1 << 17
    said = r"t\.npz: the file is damaged: its unpacked size of 33\d{6} bytes"
    with pytest.raises(TraceError, match=said):
        read_trace(path)


def test_an_array_with_a_wrong_size_is_refused(tmp_path):
    path = tmp_path / "t.npz"
    trace = random_trace(np.random.default_rng(0))
    buffer = io.BytesIO()
    np.save(buffer, trace.arrays["tokens"])
    shape = str(trace.arrays["tokens"].shape).encode()
    data = buffer.getvalue().replace(shape, b"(999999999,)")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("header.npy", data)
    with pytest.raises(TraceError, match=r"header\.npy does not have its declared size"):
        read_trace(path)
