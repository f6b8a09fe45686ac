"""A checkpoint with the shapes of Qwen3-30B-A3B and as many layers as asked for, of random
bfloat16, to see what a conversion takes:

    python tests/large_checkpoint.py FOLDER --layers 8           (11.2 GB)
    python tests/large_checkpoint.py --measure FOLDER OUT.gguf --tiers q4_k,q2_k
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from math import prod
from pathlib import Path

import numpy as np
import psutil

sys.path[:0] = [str(Path(__file__).parent / "unit"), str(Path(__file__).parents[1])]

SHAPE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}


def layer(il: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a layer's tensors, as published."""
    n, n_ff, head = 2048, 768, 128
    name = f"model.layers.{il}."
    yield name + "input_layernorm.weight", (n,)
    yield name + "post_attention_layernorm.weight", (n,)
    yield name + "self_attn.q_norm.weight", (head,)
    yield name + "self_attn.k_norm.weight", (head,)
    yield name + "self_attn.q_proj.weight", (32 * head, n)
    yield name + "self_attn.k_proj.weight", (4 * head, n)
    yield name + "self_attn.v_proj.weight", (4 * head, n)
    yield name + "self_attn.o_proj.weight", (n, 32 * head)
    yield name + "mlp.gate.weight", (128, n)
    for expert in range(128):
        for kind, shape in (("gate", (n_ff, n)), ("up", (n_ff, n)), ("down", (n, n_ff))):
            yield f"{name}mlp.experts.{expert}.{kind}_proj.weight", shape


def write(folder: Path, n_layers: int) -> None:
    from convert import checkpoints

    folder.mkdir(parents=True)
    config = {**SHAPE, "num_hidden_layers": n_layers}
    (folder / "config.json").write_text(json.dumps(config))
    checkpoints.save_tokenizer("qwen2", folder)
    vocabulary = (151936, 2048)
    ends = [
        ("model.embed_tokens.weight", vocabulary),
        ("model.norm.weight", (2048,)),
        ("lm_head.weight", vocabulary),
    ]
    files = [list(layer(il)) for il in range(n_layers)] + [ends]
    where = {}
    for number, tensors in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        write_shard(folder / name, dict(tensors), seed=number)
        where.update(dict.fromkeys(dict(tensors), name))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def write_shard(path: Path, tensors: dict[str, tuple[int, ...]], seed: int) -> None:
    header, offset = {}, 0
    for name, shape in tensors.items():
        nbytes = 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(header).encode()
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(1 << 24, np.float32) / 45
    pool = (values.view(np.uint32) >> 16).astype(np.uint16)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in tensors.values():
            left = prod(shape)
            while left:
                start = int(rng.integers(0, len(pool) // 2))
                part = pool[start : start + min(left, len(pool) // 2)]
                file.write(part.tobytes())
                left -= len(part)


def measure(arguments: list[str]) -> int:
    """Run `moe-edge convert`, and print its seconds, those that it computed in, and the most
    memory it had: all of it, and what is not a mapped file, which the system may take back."""
    started = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "orchestrator", "convert", *arguments])
    seen = psutil.Process(process.pid)
    most = own = 0
    computed_s = 0.0
    while process.poll() is None:
        try:
            memory, times = seen.memory_info(), seen.cpu_times()
        except psutil.NoSuchProcess:
            break
        computed_s = times.user + times.system
        most, own = max(most, memory.rss), max(own, memory.rss - memory.shared)
        time.sleep(0.05)
    seconds = time.monotonic() - started
    if status := process.wait():
        print(f"the conversion ended with status {status}; until then:")
    print(
        f"{seconds:.0f} s, {computed_s:.0f} s of a core, at most {most / 2**30:.2f} GiB resident,"
        f" {own / 2**30:.2f} its own"
    )
    return status


def main() -> int:
    if sys.argv[1:2] == ["--measure"]:
        return measure(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=8)
    arguments = parser.parse_args()
    write(arguments.folder, arguments.layers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
