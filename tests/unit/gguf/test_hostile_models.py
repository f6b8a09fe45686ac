"""Models that are sound GGUFs but no sound models: each is refused with its own named error."""

import pytest
from gguf_craft import N_EMBD, model_metadata, model_tensors, packed_metadata, write_model

from gguf_tools import errors
from gguf_tools.experts import ExpertModel
from gguf_tools.file.layout import DOWN, GATE, GGMLType, expert_tensor_name
from gguf_tools.file.reader import GGUFFile


def without(entries, name):
    """Tensors or metadata with one of them left out."""
    if isinstance(entries, dict):
        return {key: value for key, value in entries.items() if key != name}
    return [each for each in entries if each[0] != name]


def reshaped(tensors, name, shape):
    return [(each[0], shape, each[2]) if each[0] == name else each for each in tensors]


UP_1, GATE_1, DOWN_1 = (expert_tensor_name(1, kind) for kind in (0, GATE, DOWN))
ROUTER_1 = "blk.1.ffn_gate_inp.weight"
PACKED = model_tensors(tiers=("q8_0", "q4_0"), tier_types=(GGMLType.Q8_0, GGMLType.Q4_0))
BY_TOKEN = "blk.0.ffn_gate_tid2eid.weight"
LOW_1 = expert_tensor_name(1, DOWN, "q4_0")
# error: name: (tensors, metadata, what the message must say)
MODELS = {
    errors.MissingKeyError: {
        "no-architecture": (
            model_tensors(),
            without(model_metadata(), "general.architecture"),
            "general.architecture",
        ),
        "no-block-count": (
            model_tensors(),
            model_metadata(block_count=None),
            "qwen3moe.block_count",
        ),
        "no-embedding-length": (
            model_tensors(),
            model_metadata(embedding_length=None),
            "embedding_length",
        ),
        "no-experts-used": (
            model_tensors(),
            model_metadata(expert_used_count=None),
            "expert_used_count",
        ),
        "tiers-absent": (PACKED, without(packed_metadata(), "moe_edge.tiers"), "moe_edge.tiers"),
        "format-absent": (
            PACKED,
            without(packed_metadata(), "moe_edge.format_version"),
            "moe_edge.format_version",
        ),
    },
    errors.MetadataError: {
        "architecture-number": (
            model_tensors(),
            {**model_metadata(), "general.architecture": 7},
            "general.architecture",
        ),
        "absurd-block-count": (model_tensors(), model_metadata(block_count=1 << 31), "block_count"),
        "too-many-experts-used": (model_tensors(), model_metadata(expert_used_count=5), "5 of 4"),
        "negative-context": (model_tensors(), model_metadata(context_length=-1), "context_length"),
        "heads-text": (model_tensors(), model_metadata(head_count_kv="two"), "head_count_kv"),
        "heads-list-short": (
            model_tensors(layers=range(2)),
            model_metadata(head_count_kv=[2, 2, 2], block_count=4),
            "expected 4 numbers",
        ),
        "tier-of-a-dense-tensor": (
            [*PACKED, ("token_embd.weight.moe_edge.q4_0", (64, 3), GGMLType.Q4_0)],
            packed_metadata(),
            "token_embd.weight.moe_edge.q4_0",
        ),
        "tiers-worst-first": (
            model_tensors(tiers=("q4_0", "q8_0"), tier_types=(GGMLType.Q4_0, GGMLType.Q8_0)),
            packed_metadata(tiers=("q4_0", "q8_0")),
            "best first",
        ),
        "tiers-twice": (PACKED, packed_metadata(tiers=("q4_0", "q4_0")), "different"),
        "tiers-six": (PACKED, packed_metadata(tiers=tuple("abcdef")), "1 to 5"),
        "tiers-numbers": (
            PACKED,
            {**packed_metadata(), "moe_edge.tiers": [8, 4]},
            "moe_edge.tiers",
        ),
        "fallbacks-number": (
            PACKED,
            {**packed_metadata(), "moe_edge.fallbacks": 7},
            "key moe_edge.fallbacks: unexpected value of type uint32",
        ),
    },
    errors.NotMoEError: {
        "dense": (
            [("token_embd.weight", (N_EMBD, 3), GGMLType.F32)],
            model_metadata(),
            "no expert tensors: not a Mixture-of-Experts model: llama.cpp itself runs it",
        ),
        "one-tensor-per-expert": (
            [("blk.0.ffn_gate.0.weight", (N_EMBD, 3), GGMLType.F32)],
            model_metadata(),
            "old layout",
        ),
    },
    errors.MissingTensorError: {
        "no-up": (without(model_tensors(), UP_1), model_metadata(), UP_1),
        "no-gate": (without(model_tensors(), GATE_1), model_metadata(), f"{GATE_1} is missing"),
        "no-down": (without(model_tensors(), DOWN_1), model_metadata(), DOWN_1),
        "gate-up-and-gate": (
            [*model_tensors(fused=True), (expert_tensor_name(1, GATE), (64, 32, 4), GGMLType.F16)],
            model_metadata(),
            "unexpected matrices",
        ),
        "tier-without-best": (
            [*PACKED, (expert_tensor_name(1, 2, "q4_0"), (64, 64, 4), GGMLType.Q4_0)],
            packed_metadata(),
            "its best tier",
        ),
    },
    errors.TensorShapeError: {
        "wrong-expert-count": (
            reshaped(model_tensors(), DOWN_1, (32, 64, 3)),
            model_metadata(),
            "expected 4 experts",
        ),
        "experts-without-third-dimension": (
            reshaped(model_tensors(), DOWN_1, (32, 64)),
            model_metadata(),
            DOWN_1,
        ),
        "wrong-rows": (
            reshaped(model_tensors(), UP_1, (64, 64, 4)),
            model_metadata(),
            "beside the down matrix",
        ),
        "two-shapes": (
            reshaped(model_tensors(), GATE_1, (64, 64, 4)),
            model_metadata(),
            f"{GATE_1}: offset ",
        ),
        "router-of-fewer-experts": (
            reshaped(model_tensors(), ROUTER_1, (64, 3)),
            model_metadata(),
            f"{ROUTER_1}: offset ",
        ),
        "tier-shape": (reshaped(PACKED, LOW_1, (32, 64, 2)), packed_metadata(), LOW_1),
    },
    errors.TensorTypeError: {
        "choices-that-are-no-numbers": (
            [*model_tensors(), (BY_TOKEN, (2, 3), GGMLType.F32)],
            model_metadata(),
            f"{BY_TOKEN}: offset ",
        )
    },
    errors.ExpertIndexError: {
        "choice-of-no-expert": (
            [*model_tensors(), (BY_TOKEN, (2, 3), GGMLType.I32)],
            model_metadata(),
            f"{BY_TOKEN}: offset ",
        )
    },
    errors.MissingTierError: {
        "missing-tier": (without(PACKED, LOW_1), packed_metadata(), f"{LOW_1} is missing"),
        "missing-tier-everywhere": (
            model_tensors(types={0: GGMLType.Q8_0, 1: GGMLType.Q8_0, 3: GGMLType.Q8_0}),
            packed_metadata(),
            "announces tier q4_0",
        ),
        "unannounced-tier": (PACKED, packed_metadata(tiers=("q8_0",)), "does not list q4_0"),
    },
    errors.VersionError: {
        "format-newer": (
            PACKED,
            {**packed_metadata(), "moe_edge.format_version": 2},
            "this version reads 1",
        )
    },
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


def test_missing_file_folder_and_pipe(tmp_path):
    with pytest.raises(errors.FileAccessError, match="No such file"):
        GGUFFile.open(tmp_path / "absent.gguf")
    with pytest.raises(errors.FileAccessError, match="directory"):
        GGUFFile.open(tmp_path)
