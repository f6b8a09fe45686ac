"""Small GGUF files: valid ones by the writer, invalid ones byte by byte."""

import struct

import numpy as np

from gguf_tools.file.layout import DOWN, GATE, GATE_UP, UP, GGMLType, ValueType, expert_tensor_name
from gguf_tools.file.writer import GGUFWriter, encode_value

N_EMBD, N_FF, N_EXPERT, N_LAYER = 64, 32, 4, 2


def text(value):
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def kv(key, value, kind=None, element=None):
    return text(key) + encode_value(value, kind, element)


def tensor(name, shape=(32,), ggml_type=0, offset=0, n_dims=None):
    n_dims = len(shape) if n_dims is None else n_dims
    shape_bytes = struct.pack(f"<{len(shape)}Q", *shape)
    return (
        text(name) + struct.pack("<I", n_dims) + shape_bytes + struct.pack("<IQ", ggml_type, offset)
    )


ARCH = kv("general.architecture", "qwen3moe")


def craft(
    kvs=(ARCH,),
    tensors=(),
    data=b"",
    *,
    n_kv=None,
    n_tensors=None,
    magic=b"GGUF",
    version=3,
    align=32,
):
    """A GGUF file of encoded entries. Counts, magic and version can be wrong."""
    n_kv = len(kvs) if n_kv is None else n_kv
    n_tensors = len(tensors) if n_tensors is None else n_tensors
    head = magic + struct.pack("<IQQ", version, n_tensors, n_kv) + b"".join((*kvs, *tensors))
    return head + b"\0" * (-len(head) % align) + data


def model_metadata(arch="qwen3moe", **changes):
    """Metadata of the tiny model. changes: values by the last part of the key; None removes it."""
    values = {
        "general.architecture": arch,
        "general.name": "tiny",
        f"{arch}.block_count": N_LAYER,
        f"{arch}.context_length": 512,
        f"{arch}.embedding_length": N_EMBD,
        f"{arch}.attention.head_count": 4,
        f"{arch}.attention.head_count_kv": 2,
        f"{arch}.expert_count": N_EXPERT,
        f"{arch}.expert_used_count": 2,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a", "b", "c"],
    }
    for name, value in changes.items():
        key = next((key for key in values if key.endswith(name)), f"{arch}.{name}")
        values[key] = value
    return {key: value for key, value in values.items() if value is not None}


def model_tensors(
    *,
    types=None,
    n_embd=N_EMBD,
    n_ff=N_FF,
    n_expert=N_EXPERT,
    layers=range(N_LAYER),
    fused=False,
    gated=True,
    tiers=("",),
    tier_types=None,
):
    """List of (name, shape, type) for a tiny model. types: ggml types by kind. tier_types: ggml
    types by tier."""
    found = [("token_embd.weight", (n_embd, 3), GGMLType.F32)]
    kinds = {DOWN: (n_ff, n_embd)}
    if fused:
        kinds[GATE_UP] = (n_embd, 2 * n_ff)
    else:
        kinds[UP] = (n_embd, n_ff)
        if gated:
            kinds[GATE] = (n_embd, n_ff)
    for il in layers:
        found.append((f"blk.{il}.ffn_gate_inp.weight", (n_embd, n_expert), GGMLType.F32))
        for kind in sorted(kinds):
            for index, tier in enumerate(tiers):
                ggml_type = (types or {}).get(kind, GGMLType.F16)
                if tier_types:
                    ggml_type = tier_types[index]
                name = expert_tensor_name(il, kind, tier if index else None)
                found.append((name, (*kinds[kind], n_expert), ggml_type))
    return found


def write_model(path, tensors=None, metadata=None, *, alignment=32, seed=0, extra=()):
    """Write a complete file of random values. Integer and quantized types get random bytes."""
    tensors = model_tensors() if tensors is None else tensors
    metadata = model_metadata() if metadata is None else metadata
    random = np.random.default_rng(seed)
    writer = GGUFWriter(path, alignment)
    for key, value in metadata.items():
        writer.meta(key, value)
    for key, value, kind, element in extra:
        writer.meta(key, value, kind, element)
    for name, shape, ggml_type in tensors:
        writer.declare(name, shape, ggml_type)
    with writer:
        writer.begin()
        for name, shape, ggml_type in tensors:
            writer.write_tensor(name, random_data(random, shape, ggml_type, writer, name))
    return writer.path


def random_data(random, shape, ggml_type, writer, name):
    if ggml_type in (GGMLType.F32, GGMLType.F16):
        values = random.standard_normal(int(np.prod(shape)), np.float32) * 0.05
        return values.astype(np.float16 if ggml_type is GGMLType.F16 else np.float32)
    return random.integers(0, 256, writer.tensors[name].nbytes, np.uint8)


def packed_metadata(tiers=("q8_0", "q4_0"), **changes):
    """Metadata of a packed file."""
    return {
        **model_metadata(**changes),
        "moe_edge.format_version": 1,
        "moe_edge.tiers": list(tiers),
        "moe_edge.tier_bpw": [8.5, 4.5][: len(tiers)],
        "moe_edge.quantization": "ggml",
        "moe_edge.calibration": "none",
    }


def write_packed(path, **changes):
    """Write a packed file with two tiers, q8_0 and q4_0."""
    tensors = model_tensors(tiers=("q8_0", "q4_0"), tier_types=(GGMLType.Q8_0, GGMLType.Q4_0))
    return write_model(path, tensors, packed_metadata(**changes), alignment=4096)


U32 = ValueType.UINT32
