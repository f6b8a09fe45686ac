"""ExpertModel: ordinary, packed, paired, split and fused files, and files with dense layers
first."""

import numpy as np
import pytest
from gguf_craft import (
    N_EXPERT,
    model_metadata,
    model_tensors,
    packed_metadata,
    write_model,
    write_packed,
)
from tables import cases

from gguf_tools import errors
from gguf_tools.experts import ExpertModel
from gguf_tools.experts.hparams import SIGMOID, SOFTMAX
from gguf_tools.file.layout import (
    DOWN,
    GATE,
    GATE_UP,
    KINDS,
    UP,
    GGMLType,
    expert_tensor_name,
    parse_expert_name,
    slot_bytes,
)
from gguf_tools.file.reader import GGUFFile

LENGTHS = {"attention.key_length": 40, "attention.value_length": 24}
LATENT = {"attention.key_length_mla": 24, "attention.value_length_mla": 16}


def opened(folder, *args, **more):
    return ExpertModel.open(write_model(folder / "m.gguf", *args, **more))


def types(up, down):
    return {UP: up, GATE: up, DOWN: down}


def test_names_round_trip():
    for kind in range(len(KINDS)):
        assert parse_expert_name(expert_tensor_name(12, kind)) == (12, kind, None)
        assert parse_expert_name(expert_tensor_name(0, kind, "q2_k")) == (0, kind, "q2_k")
    for other in ("blk.0.ffn_up_shexp.weight", "blk.00.ffn_up_exps.weight", "ffn_up_exps.weight"):
        assert parse_expert_name(other) is None
    assert parse_expert_name("blk.0.ffn_up_exps.bias") is None


def test_ordinary_file(tmp_path):
    path = write_model(tmp_path / "m.gguf")
    with ExpertModel.open(path) as model, GGUFFile.open(path) as file:
        assert model.hparams.arch == "qwen3moe"
        assert (model.n_layers, model.layer_ids) == (2, [0, 1])
        assert (model.n_expert, model.n_expert_used) == (4, 2)
        assert [tier.name for tier in model.tiers] == ["f16"]
        assert model.tiers[0].bpw == 16
        assert model.tiers[0].bytes_per_expert == 3 * 64 * 32 * 2
        assert model.tier_bytes == [2 * 4 * 3 * 64 * 32 * 2]
        assert model.kinds(0) == [UP, GATE, DOWN]
        assert model.shapes[0] == ((64, 32), (64, 32), None, (32, 64))
        assert model.slices[1][GATE_UP] == (None,)
        total = sum(info.nbytes for info in file.tensors.values())
        assert model.dense_bytes == total - model.tier_bytes[0]
        for layer, il in enumerate(model.layer_ids):
            for kind in model.kinds(layer):
                info = file.tensors[expert_tensor_name(il, kind)]
                found = model.slices[layer][kind][0]
                assert (found.file_index, found.offset, found.type) == (0, info.offset, info.type)
                assert found.expert_bytes * N_EXPERT == info.nbytes


def test_mixed_types_are_one_tier_named_by_most_bytes(tmp_path):
    tensors = model_tensors(n_embd=256, n_ff=256, types=types(GGMLType.Q4_K, GGMLType.Q6_K))
    metadata = model_metadata(embedding_length=256)
    with opened(tmp_path, tensors, metadata) as model:
        assert [tier.name for tier in model.tiers] == ["q4_k"]
        assert model.tiers[0].bpw == pytest.approx((2 * 4.5 + 6.5625) / 3)
        assert model.slices[0][DOWN][0].type is GGMLType.Q6_K


def test_packed_file(tmp_path):
    with ExpertModel.open(write_packed(tmp_path / "m.gguf")) as model:
        assert [(tier.name, tier.bpw) for tier in model.tiers] == [("q8_0", 8.5), ("q4_0", 4.5)]
        assert model.tier_bytes == [2 * 4 * 3 * 64 * 34, 2 * 4 * 3 * 64 * 18]
        high, low = model.slices[0][UP]
        assert (high.type, low.type) == (GGMLType.Q8_0, GGMLType.Q4_0)
        assert high.offset % 4096 == low.offset % 4096 == 0
        assert model.tier_index("Q4_0") == 1
        with pytest.raises(errors.MissingTierError, match="choose one of q8_0, q4_0"):
            model.tier_index("q2_k")


def test_dense_layers_first_and_shared_experts(tmp_path):
    tensors = [
        ("blk.0.ffn_up.weight", (64, 128), GGMLType.F32),
        ("blk.1.ffn_up_shexp.weight", (64, 32), GGMLType.F32),
        *model_tensors(layers=[1, 2]),
    ]
    with opened(tmp_path, tensors, model_metadata(block_count=3)) as model:
        assert (model.hparams.block_count, model.n_layers, model.layer_ids) == (3, 2, [1, 2])
        assert model.has_shared
        assert model.dense_bytes == 4 * (64 * 3 + 2 * 64 * 4 + 64 * 128 + 64 * 32)


@cases("changes, kinds", ({"fused": True}, [GATE_UP, DOWN]), ({"gated": False}, [UP, DOWN]))
def test_fused_and_ungated_layers(tmp_path, changes, kinds):
    with opened(tmp_path, model_tensors(**changes)) as model:
        assert model.kinds(0) == kinds
        assert model.shapes[0][GATE_UP] == ((64, 64) if "fused" in changes else None)


def test_layers_that_predict_further_tokens_are_not_routed(tmp_path):
    tensors = model_tensors(layers=range(3))
    metadata = model_metadata(block_count=3, nextn_predict_layers=1)
    with opened(tmp_path, tensors, metadata) as model:
        assert model.layer_ids == [0, 1]
        assert model.dense_bytes > model.tier_bytes[0] // 2


def test_expert_used_may_differ_by_layer(tmp_path):
    with opened(tmp_path, metadata=model_metadata(expert_used_count=[1, 3])) as model:
        assert model.n_expert_used == 3


@cases(
    "arch, said, gating",
    ("qwen3moe", {}, SOFTMAX),
    ("qwen3moe", {"expert_gating_func": 2}, SIGMOID),
    ("glm4moe", {}, SIGMOID),
    ("glm4moe", {"expert_gating_func": 0}, SIGMOID),
    ("glm4moe", {"expert_gating_func": 1}, SOFTMAX),
    ("llama4", {"expert_gating_func": 1}, SIGMOID),
)
def test_a_router_has_the_function_of_its_architecture(tmp_path, arch, said, gating):
    with opened(tmp_path, metadata=model_metadata(arch, **said)) as model:
        assert model.hparams.gating == gating


@cases(
    "changes, nbytes",
    # 2 layers, 2 heads with 16 values, keys and values in F16
    ({}, 2 * 2 * 2 * 16 * 2 * 256),
    ({"head_count_kv": [0, 1], **LENGTHS}, (40 + 24) * 2 * 256),
    # Latent attention stores only keys.
    ({**LENGTHS, **LATENT, "head_count_kv": 1}, 2 * 40 * 2 * 256),
)
def test_kv_bytes(tmp_path, changes, nbytes):
    """KV cells are allocated in steps of 256."""
    with opened(tmp_path, metadata=model_metadata(**changes)) as model:
        assert model.hparams.is_mla == ("attention.key_length_mla" in changes)
        assert [model.kv_bytes(n) for n in (1, 256, 257)] == [nbytes, nbytes, 2 * nbytes]


def pair(tmp_path, high=None, low=None, seed=0, **metadata):
    """Two files of one model. metadata: changes in the low one."""
    high, low = high or of_one_type(GGMLType.Q8_0), low or of_one_type(GGMLType.Q4_0)
    return (
        write_model(tmp_path / "high.gguf", high),
        write_model(tmp_path / "low.gguf", low, model_metadata(**metadata), seed=seed),
    )


def of_one_type(ggml_type, **changes):
    return model_tensors(types=dict.fromkeys(range(4), ggml_type), **changes)


def same_routers(tmp_path, **changes):
    """A pair with equal routers, as files of one model have."""
    return copy_routers(*pair(tmp_path, **changes))


def copy_routers(high, low):
    data = bytearray(low.read_bytes())
    with GGUFFile.open(high) as source, GGUFFile.open(low) as file:
        for name, info in file.tensors.items():
            if "gate_inp" in name and name in source.tensors:
                router = source.array(name)[: info.nbytes]
                data[info.offset : info.offset + router.nbytes] = router.tobytes()
    low.write_bytes(data)
    return high, low


def test_low_adds_a_tier(tmp_path):
    high, low = same_routers(tmp_path)
    with ExpertModel.open(high, low) as model:
        assert [tier.name for tier in model.tiers] == ["q8_0", "q4_0"]
        assert model.files == [high, low]
        assert [each.file_index for each in model.slices[0][UP]] == [0, 1]
        assert model.slices[0][GATE_UP] == (None, None)
        assert len(model.tier_bytes) == 2
        with ExpertModel.open(high) as alone:
            assert model.dense_bytes == alone.dense_bytes


def test_low_of_the_same_type_gets_a_name_of_its_own(tmp_path):
    mixed = model_tensors(types=types(GGMLType.Q8_0, GGMLType.F16))
    same = model_tensors(types=types(GGMLType.Q8_0, GGMLType.Q4_0))
    high, low = same_routers(tmp_path, high=mixed, low=same)
    with ExpertModel.open(high, low) as model:
        assert len({tier.name for tier in model.tiers}) == 2


def mismatch(paths, says):
    high, low = paths
    with pytest.raises(errors.MismatchError) as caught:
        ExpertModel.open(high, low)
    assert str(caught.value).startswith(f"{low}: ")
    assert says in str(caught.value)


Q4_0 = GGMLType.Q4_0


@cases(
    "says, changes",
    ("architecture: 'olmoe', but 'qwen3moe' in", {"arch": "olmoe"}),
    ("MoE layers: [0], but [0, 1] in", {"low": of_one_type(Q4_0, layers=[0])}),
    ("experts: 2, but 4 in", {"low": of_one_type(Q4_0, n_expert=2), "expert_count": 2}),
    ("experts per token: 1, but 2 in", {"expert_used_count": 1}),
    ("shape of up in layer 0: (64, 64), but (64, 32) in", {"low": of_one_type(Q4_0, n_ff=64)}),
    ("shape of up in layer 0: None, but", {"low": of_one_type(Q4_0, fused=True)}),
    ("head_count_kv: 1, but 2 in", {"head_count_kv": 1}),
    ("key tokenizer.ggml.model: 't5', but", {"tokenizer.ggml.model": "t5"}),
    ("tokenizer.ggml.tokens[2]: 'd', but 'c' in", {"tokenizer.ggml.tokens": ["a", "b", "d"]}),
    ("length of tokenizer.ggml.tokens: 2, but 3 in", {"tokenizer.ggml.tokens": ["a", "b"]}),
)
def test_low_must_be_the_same_model(tmp_path, says, changes):
    mismatch(same_routers(tmp_path, **changes), says)


def test_low_of_another_fine_tune_or_not_less_precise(tmp_path):
    mismatch(pair(tmp_path, seed=1), "the routers blk.0.ffn_gate_inp.weight differ")
    high, low = same_routers(tmp_path)
    mismatch((low, high), "8.50 bits per weight, not below the 4.50")
    mismatch((low, high), "swap the two files")
    mismatch((low, low), "the same precision as")


def test_low_may_not_add_too_many_tiers(tmp_path):
    names = ("f16", "q8_0", "q5_1", "q5_0", "q4_0")
    tensors = model_tensors(tiers=names, tier_types=[GGMLType[name.upper()] for name in names])
    metadata = {**packed_metadata(), "moe_edge.tiers": list(names)}
    high = write_model(tmp_path / "high.gguf", tensors, metadata)
    tensors = model_tensors(types=types(GGMLType.Q2_0, GGMLType.Q4_0))
    mismatch(copy_routers(high, write_model(tmp_path / "low.gguf", tensors)), "at most 5")


def test_slot_bytes_cover_every_expert():
    def window(offset, nbytes):
        return -(-(offset + nbytes) // 4096) * 4096 - offset // 4096 * 4096

    random = np.random.default_rng(0)
    for offset, nbytes in random.integers(1, 1 << 20, (200, 2)).tolist():
        for n_expert in (1, 3, 64):
            most = max(window(offset + e * nbytes, nbytes) for e in range(n_expert))
            assert slot_bytes(offset, nbytes, n_expert) == most
    assert slot_bytes(4096, 8192, 64) == 8192
    assert slot_bytes(4096 + 32, 8192, 64) == 12288
