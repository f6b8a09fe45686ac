"""Valid GGUF files that are not valid models. Each is refused by a specific error."""

import pytest
from gguf_craft import N_EMBD, model_metadata, model_tensors, packed_metadata, write_model

from gguf_tools import errors
from gguf_tools.experts import ExpertModel
from gguf_tools.file.layout import DOWN, GATE, GGMLType, expert_tensor_name
from gguf_tools.file.reader import GGUFFile

PACKED = model_tensors(tiers=("q8_0", "q4_0"), tier_types=(GGMLType.Q8_0, GGMLType.Q4_0))
SWAPPED = model_tensors(tiers=("q4_0", "q8_0"), tier_types=(GGMLType.Q4_0, GGMLType.Q8_0))
UP_1, GATE_1, DOWN_1 = (expert_tensor_name(1, kind) for kind in (0, GATE, DOWN))
LOW_1, LOW_GATE_UP_1 = (expert_tensor_name(1, kind, "q4_0") for kind in (DOWN, 2))
ROUTER_1, BY_TOKEN = "blk.1.ffn_gate_inp.weight", "blk.0.ffn_gate_tid2eid.weight"
LOW_DENSE = "token_embd.weight.moe_edge.q4_0"


def without(name, tensors=None):
    return [each for each in tensors or model_tensors() if each[0] != name]


def reshaped(name, shape, tensors=None):
    found = tensors or model_tensors()
    return [(each[0], shape, each[2]) if each[0] == name else each for each in found]


def with_one(name, shape, ggml_type, tensors=None):
    return [*(tensors or model_tensors()), (name, shape, ggml_type)]


def plain(says, tensors=None, **metadata):
    """(tensors, metadata, part of the message) for an ordinary model. metadata: changes for
    model_metadata."""
    return tensors or model_tensors(), model_metadata(**metadata), says


def packed(says, tensors=PACKED, **keys):
    """(tensors, metadata, part of the message) for a packed model. keys: our metadata keys; None
    removes one."""
    metadata = packed_metadata() | {f"moe_edge.{key}": value for key, value in keys.items()}
    return tensors, {key: value for key, value in metadata.items() if value is not None}, says


NAN, INF = float("nan"), float("inf")
EPSILON, BASE = "attention.layer_norm_rms_epsilon", "rope.freq_base"
# Metadata that llama.cpp does not check, and with which it aborts or computes only NaN.
FATAL = [
    ("rope.dimension_count", 7, "the value is 7, expected an even number of at most 16"),
    ("rope.dimension_count", 128, "the value is 128, expected an even number of at most 16"),
    ("rope.dimension_count", -2, "the value is -2, expected an even number"),
    ("rope.dimension_count_swa", 3, "the value is 3, expected an even number"),
    (
        "rope.scaling.type",
        "strange",
        "the value is 'strange', expected one of none, linear, yarn, longrope",
    ),
    ("rope.scaling.factor", NAN, "the value is nan, expected a finite number"),
    (EPSILON, NAN, "the value is nan, expected a finite number"),
    (EPSILON, -1.0, "the value is -1.0, expected 0 or more"),
    (EPSILON, INF, "the value is inf, expected a finite number"),
    (BASE, NAN, "the value is nan, expected a finite number"),
    (BASE, 0.0, "the value is 0.0, expected more than 0"),
    (BASE, -5.0, "the value is -5.0, expected more than 0"),
    ("expert_weights_scale", NAN, "the value is nan, expected a finite number"),
    ("swiglu_clamp_exp", [1.0, NAN], "the value is nan, expected a finite number"),
    ("expert_group_count", 3, "the value is 3, expected a divisor of 4 experts"),
    ("expert_group_count", 4, "the value is 4, expected a divisor of 4 experts"),
    ("tokenizer.ggml.tokens", ["a", "b", "a"], "token 2 occurs twice: 'a'"),
]

# error: {name: (tensors, metadata, part of the message)}
MODELS = {
    errors.MissingKeyError: {
        "no-architecture": plain("general.architecture", architecture=None),
        "no-block-count": plain("qwen3moe.block_count", block_count=None),
        "no-embedding-length": plain("embedding_length", embedding_length=None),
        "no-experts-used": plain("expert_used_count", expert_used_count=None),
        "tiers-absent": packed("moe_edge.tiers", tiers=None),
        "format-absent": packed("moe_edge.format_version", format_version=None),
    },
    errors.MetadataError: {
        "architecture-number": plain("general.architecture", architecture=7),
        "architecture-control": plain(
            "general.architecture: 'qwen\\n\\x1b[31m' has control characters",
            architecture="qwen\n\x1b[31m",
        ),
        "tiers-control": packed("'q8\\n_0', 'q4_0'", tiers=["q8\n_0", "q4_0"]),
        "absurd-block-count": plain("block_count", block_count=1 << 31),
        "too-many-experts-used": plain("5, expected 1 to 4 experts", expert_used_count=5),
        "negative-context": plain("context_length", context_length=-1),
        "heads-text": plain("head_count_kv", head_count_kv="two"),
        "heads-list-short": plain("expected 4 numbers", head_count_kv=[2, 2, 2], block_count=4),
        "tier-of-a-dense-tensor": packed(
            LOW_DENSE, with_one(LOW_DENSE, (64, 3), GGMLType.Q4_0, PACKED)
        ),
        "tiers-worst-first": packed("list the best tier first", SWAPPED, tiers=["q4_0", "q8_0"]),
        "tiers-twice": packed("different", tiers=["q4_0", "q4_0"]),
        "tiers-six": packed("1 to 5", tiers=list("abcdef")),
        "tiers-numbers": packed("moe_edge.tiers", tiers=[8, 4]),
        "fallbacks-number": packed(
            "key moe_edge.fallbacks: unexpected value of type uint32", fallbacks=7
        ),
        **{f"{key}-{value}": plain(f"{key}: {said}", **{key: value}) for key, value, said in FATAL},
        "tokenizer.ggml.model-llama": plain(
            "the vocabulary has no line feed token (<0x0A>)",
            **{"tokenizer.ggml.model": "llama"},
        ),
    },
    errors.NotMoEError: {
        "dense": plain(
            "no expert tensors: not a Mixture-of-Experts model: use llama.cpp to run it",
            [("token_embd.weight", (N_EMBD, 3), GGMLType.F32)],
        ),
        "one-tensor-per-expert": plain(
            "old layout", [("blk.0.ffn_gate.0.weight", (N_EMBD, 3), GGMLType.F32)]
        ),
    },
    errors.MissingTensorError: {
        "no-up": plain(UP_1, without(UP_1)),
        "no-gate": plain(f"{GATE_1} is missing", without(GATE_1)),
        "no-down": plain(DOWN_1, without(DOWN_1)),
        "gate-up-and-gate": plain(
            "unexpected matrices",
            with_one(GATE_1, (64, 32, 4), GGMLType.F16, model_tensors(fused=True)),
        ),
        "tier-without-best": packed(
            "the best tier", with_one(LOW_GATE_UP_1, (64, 64, 4), GGMLType.Q4_0, PACKED)
        ),
    },
    errors.TensorShapeError: {
        "wrong-expert-count": plain("expected 4 experts", reshaped(DOWN_1, (32, 64, 3))),
        "experts-without-third-dimension": plain(DOWN_1, reshaped(DOWN_1, (32, 64))),
        "wrong-rows": plain("to match the down matrix", reshaped(UP_1, (64, 64, 4))),
        "two-shapes": plain(f"{GATE_1}: offset ", reshaped(GATE_1, (64, 64, 4))),
        "router-of-fewer-experts": plain(f"{ROUTER_1}: offset ", reshaped(ROUTER_1, (64, 3))),
        "tier-shape": packed(LOW_1, reshaped(LOW_1, (32, 64, 2), PACKED)),
    },
    errors.TensorTypeError: {
        "choices-that-are-no-numbers": plain(
            f"{BY_TOKEN}: offset ", with_one(BY_TOKEN, (2, 3), GGMLType.F32)
        ),
        **{
            name: plain(f"{name}: type F16, expected F32", with_one(name, shape, GGMLType.F16))
            for name, shape in (
                ("output_norm.weight", (64,)),
                ("blk.0.attn_q_norm.weight", (16, 4)),
                ("blk.0.exp_probs_b.bias", (4,)),
            )
        },
    },
    errors.ExpertIndexError: {
        "choice-of-no-expert": plain(
            f"{BY_TOKEN}: offset ", with_one(BY_TOKEN, (2, 3), GGMLType.I32)
        )
    },
    errors.MissingTierError: {
        "missing-tier": packed(f"{LOW_1} is missing", without(LOW_1, PACKED)),
        "missing-tier-everywhere": packed(
            "lists tier q4_0", model_tensors(types=dict.fromkeys((0, 1, 3), GGMLType.Q8_0))
        ),
        "unannounced-tier": packed("does not list q4_0", tiers=["q8_0"], tier_bpw=[8.5]),
    },
    errors.VersionError: {"format-newer": packed("version of moe-edge reads 1", format_version=2)},
}


@pytest.mark.parametrize(
    ("name", "error"), [(name, error) for error, named in MODELS.items() for name in named]
)
def test_hostile_model(name, error, tmp_path):
    tensors, metadata, says = MODELS[error][name]
    path = write_model(tmp_path / f"{name}.gguf", tensors, metadata)
    with pytest.raises(error) as caught:
        ExpertModel.open(path)
    assert str(caught.value).startswith(str(path))
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope.dimension_count": 0},  # some architectures rotate nothing
        {"rope.dimension_count": 8},
        {"rope.scaling.factor": 0.0},
        {EPSILON: 0.0},
        {"expert_group_count": 2, "expert_group_used_count": 1},
        {"tokenizer.ggml.tokens": ["", "", "a"]},
        {"tokenizer.ggml.tokens": ["<0x0A>", "b", "a"], "tokenizer.ggml.model": "llama"},
    ],
)
def test_an_unusual_model(tmp_path, changes):
    ExpertModel.open(write_model(tmp_path / "a.gguf", metadata=model_metadata(**changes))).close()


def test_missing_file_folder_and_pipe(tmp_path):
    with pytest.raises(errors.FileAccessError, match="No such file"):
        GGUFFile.open(tmp_path / "absent.gguf")
    with pytest.raises(errors.FileAccessError, match="directory"):
        GGUFFile.open(tmp_path)
