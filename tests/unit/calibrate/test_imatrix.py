"""Importance matrices: values, file formats, and refusals."""

import struct

import numpy as np
import pytest

from gguf_tools import errors, synthetic
from gguf_tools.experts import ExpertModel
from gguf_tools.file.layout import DOWN, GATE, GATE_UP, UP, GGMLType, expert_tensor_name
from gguf_tools.file.writer import GGUFWriter
from gguf_tools.quantize.imatrix import (
    LEAST_TOKENS,
    Entry,
    ExpertImportance,
    Imatrix,
    read_imatrix,
    write_imatrix,
)
from orchestrator.lab.calibrate.capture import Capture, read_calibration
from orchestrator.lab.calibrate.methods import gather, sum_squares


@pytest.fixture(scope="module")
def gathered(model, tmp_path_factory):
    """(importance matrix of the tiny model, windows of the text)."""
    text = tmp_path_factory.mktemp("text") / "calib.txt"
    text.write_text("Once upon a time an owl lived in an oak, and it was never at home. " * 8)
    with Capture(model, threads=1) as capture, ExpertModel.open(model) as facts:
        calibration = read_calibration(capture.tokenize, text, limit=400, window=128)
        return gather(capture, facts, calibration), calibration.windows


def test_sums_equal_a_simple_computation(gathered, model):
    """Sums computed token by token in double precision."""
    imatrix, windows = gathered
    n = 8
    sums = {name: np.zeros(entry.sums.shape) for name, entry in imatrix.entries.items()}
    counts = np.zeros((3, n))

    def add(layer, _number, seen):
        for t, chosen in enumerate(seen.ids):
            for slot, expert in enumerate(chosen):
                counts[layer, expert] += 1
                for kind in (UP, GATE):
                    sums[expert_tensor_name(layer, kind)][expert] += seen.x[t, 0] ** 2.0
                sums[expert_tensor_name(layer, DOWN)][expert] += seen.hidden[t, slot] ** 2.0

    with Capture(model, threads=1) as capture:
        capture.read(windows, range(3), add)
    assert len(imatrix.entries) == 9
    for name, entry in imatrix.entries.items():
        assert entry.sums.shape == (n, 256) and entry.sums.dtype == np.float32
        assert np.allclose(entry.sums, sums[name], rtol=1e-4), name
        assert np.array_equal(entry.counts, counts[int(name.split(".")[1])])
    assert counts.sum() == 3 * 2 * sum(len(window) for window in windows)


def test_inputs_of_each_slot_go_to_their_expert():
    ids = np.array([[0, 2], [2, 1]], np.int32)
    values = np.array([[[1.0], [2.0]], [[3.0], [4.0]]], np.float32)
    assert sum_squares(values, ids, 4).ravel().tolist() == [1, 16, 4 + 9, 0]
    assert sum_squares(values[:, :1], ids, 4).ravel().tolist() == [1, 9, 1 + 9, 0]


def test_a_written_file_has_upstreams_format(gathered, tmp_path):
    gguf = pytest.importorskip("gguf", reason="needs gguf: pip install -e '.[dev]'")
    imatrix, windows = gathered
    path = tmp_path / "m.imatrix.gguf"
    write_imatrix(path, imatrix)
    again = read_imatrix(path)
    assert (again.datasets, again.chunk_count) == (["calib.txt"], len(windows))
    assert (again.chunk_size, again.has_counts) == (512, True)
    assert "calib.txt" in again.summary() and path.name in again.summary()
    for name, entry in imatrix.entries.items():
        assert np.array_equal(again.entries[name].sums, entry.sums.ravel())
        assert np.array_equal(again.entries[name].counts, entry.counts)

    reader = gguf.GGUFReader(path)
    assert reader.get_field("general.type").contents() == "imatrix"
    assert reader.get_field("imatrix.datasets").contents() == ["calib.txt"]
    assert reader.get_field("imatrix.chunk_count").contents() == len(windows)
    found = {tensor.name: tensor for tensor in reader.tensors}
    name = expert_tensor_name(1, DOWN)
    assert found[f"{name}.in_sum2"].shape.tolist() == [256, 8]
    assert found[f"{name}.counts"].shape.tolist() == [1, 8]
    assert np.array_equal(found[f"{name}.in_sum2"].data, imatrix.entries[name].sums)


def made(n=8, width=256, tokens=100, layers=3):
    """An importance matrix for the tiny model, where expert e has the mean e + 1."""
    counts = np.full(n, tokens, np.float32)
    sums = np.arange(1, n + 1, dtype=np.float32)[:, None] * np.full(width, tokens, np.float32)
    return Imatrix(
        "made",
        {
            expert_tensor_name(il, kind): Entry(sums.copy(), counts.copy())
            for il in range(layers)
            for kind in (UP, GATE, DOWN)
        },
    )


def test_an_expert_that_saw_too_little_gets_the_mean_of_its_layer(model):
    imatrix = made()
    for kind in (UP, GATE, DOWN):
        entry = imatrix.entries[expert_tensor_name(1, kind)]
        entry.sums[3], entry.counts[3] = 0, 0
        entry.counts[5] = LEAST_TOKENS - 1
        entry.sums[5] = 1000
    with ExpertModel.open(model) as facts:
        importance = ExpertImportance(imatrix, facts)
    assert importance.weak == [(1, 3, 0), (1, 5, LEAST_TOKENS - 1)]
    note = importance.note()
    assert note is not None and note.startswith("2 experts saw fewer than 32 calibration tokens")
    assert "3 of layer 1 (0), 5 of layer 1 (31)" in note
    mean = (100 * (1 + 2 + 3 + 5 + 7 + 8) + 1000) / (6 * 100 + LEAST_TOKENS - 1)
    for expert, expected in ((3, mean), (5, mean), (4, 5), (7, 8)):
        assert np.allclose(importance.of(1, DOWN, expert), expected)
    assert np.allclose(importance.of(0, UP, 3), 4)
    assert importance.counts(1)[3] == 0


def test_gate_and_up_may_be_fused_in_one_of_the_files(ggml, tmp_path):
    fused = synthetic.write(tmp_path / "m.gguf", "tiny-deepseek2-fused", tiers=("f16",))
    imatrix = made()
    for il in (1, 2):
        name = expert_tensor_name(il, DOWN)
        imatrix.entries[name] = Entry(np.ones((8, 256), np.float32), np.full(8, 50, np.float32))
    with ExpertModel.open(fused) as facts:
        importance = ExpertImportance(imatrix, facts)
    assert np.allclose(importance.of(0, GATE_UP, 6), 7)


@pytest.mark.parametrize(
    ("imatrix", "message"),
    [
        (
            made(layers=2),
            r"made: no entry for blk\.2\.ffn_up_exps\.weight: the file was made with another",
        ),
        (made(n=4), r"made: blk\.0\.ffn_up_exps\.weight: 1024 values and 4 counts, but .*tiny"),
        (made(width=512), r"4096 values and 8 counts, but .* has 8 experts with rows of 256"),
    ],
)
def test_another_models_imatrix_is_refused(imatrix, message, model):
    with (
        ExpertModel.open(model) as facts,
        pytest.raises(errors.MismatchError, match=message),
    ):
        ExpertImportance(imatrix, facts)


def legacy(entries, tail=b""):
    data = struct.pack("<i", len(entries))
    for name, (calls, values) in entries.items():
        data += struct.pack("<i", len(name)) + name.encode()
        data += struct.pack("<ii", calls, values.size) + values.astype(np.float32).tobytes()
    return data + tail


def test_the_older_format_is_read(model, tmp_path):
    path = tmp_path / "old.imatrix"
    means = np.arange(1, 9, dtype=np.float32)[:, None] * np.ones(256, np.float32)
    path.write_bytes(
        legacy(
            dict.fromkeys(made().entries, (4, 4 * means)),
            struct.pack("<ii", 4, 8) + b"wiki.txt",
        )
    )
    imatrix = read_imatrix(path)
    assert (imatrix.datasets, imatrix.chunk_count) == (["wiki.txt"], 4)
    with ExpertModel.open(model) as facts:
        importance = ExpertImportance(imatrix, facts)
    # Four chunks are not four tokens, so no expert is reported as having too few.
    assert importance.note() is None
    assert np.allclose(importance.of(2, GATE, 5), 6)
    path.write_bytes(legacy(dict.fromkeys(made().entries, (4, 4 * means))))
    assert read_imatrix(path).datasets == []


def gguf_file(path, tensors):
    writer = GGUFWriter(path)
    for name, values in tensors.items():
        kind = GGMLType.F32 if values.dtype == np.float32 else GGMLType.F16
        writer.declare(name, values.shape[::-1], kind)
    with writer:
        writer.begin()
        for name, values in tensors.items():
            writer.write_tensor(name, values)
    return path


ONES = np.ones((2, 32), np.float32)


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        ({"a.weight": ONES}, errors.MissingTensorError, r"not an importance matrix"),
        ({"a.in_sum2": ONES}, errors.MissingTensorError, r"tensor a\.counts is missing"),
        (
            {"a.in_sum2": ONES.astype(np.float16), "a.counts": ONES},
            errors.TensorTypeError,
            r"a\.in_sum2: type f16, expected f32",
        ),
        (
            {"a.in_sum2": -ONES, "a.counts": ONES},
            errors.MetadataError,
            "a: a value is negative or not finite",
        ),
        (
            {"a.in_sum2": ONES, "a.counts": ONES * np.float32(np.inf)},
            errors.MetadataError,
            "a: a value is negative or not finite",
        ),
    ],
)
def test_a_bad_file_is_a_sentence(tensors, error, message, tmp_path):
    with pytest.raises(error, match=rf"bad\.gguf: .*{message}|bad\.gguf: {message}"):
        read_imatrix(gguf_file(tmp_path / "bad.gguf", tensors))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x01\x00",
        b"hello, this is no imatrix at all",
        struct.pack("<i", 0),
        struct.pack("<ii", 1, -5) + b"name",
        struct.pack("<ii", 1, 1 << 30) + b"name",
        legacy({"a": (1, ONES)})[:-1],
        legacy({"a": (1, ONES)}).replace(struct.pack("<i", ONES.size), struct.pack("<i", -4)),
    ],
)
def test_junk_is_a_sentence(data, tmp_path):
    path = tmp_path / "junk.dat"
    path.write_bytes(data)
    with pytest.raises(errors.MagicError, match=r"junk\.dat: neither a GGUF nor an importance"):
        read_imatrix(path)
