"""DeepSeek-MoE-16B, which transformers has no class for: a small reference of our own.

From the paper (arXiv 2401.06066, section 3): attention as in Llama, a first dense layer, then
layers of shared experts beside routed ones, which a softmax weighs without normalising again.
Tensors have the names of the published checkpoint.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn.functional import linear, silu

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekForCausalLM"],
    "model_type": "deepseek",
    "hidden_size": 64,
    "intermediate_size": 160,
    "moe_intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "norm_topk_prob": False,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


@dataclass
class DeepseekMoe:
    """``weights``: by their names in the checkpoint."""

    config: dict[str, Any]
    weights: dict[str, torch.Tensor]

    def __call__(self, tokens: torch.Tensor, **_: Any) -> SimpleNamespace:
        """Logits [1, T, vocab] of token numbers [1, T]."""
        x = self.weights["model.embed_tokens.weight"][tokens[0]]
        for il in range(self.config["num_hidden_layers"]):
            layer = f"model.layers.{il}."
            x = x + self._attention(layer, self._norm(layer + "input_layernorm", x))
            y = self._norm(layer + "post_attention_layernorm", x)
            dense = il < self.config["first_k_dense_replace"]
            x = x + (self._gated(layer + "mlp", y) if dense else self._moe(layer + "mlp", y))
        return SimpleNamespace(logits=self._linear("lm_head", self._norm("model.norm", x))[None])

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file(self.weights, folder / "model.safetensors")

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weights[name + ".weight"])

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x * scale * self.weights[name + ".weight"]

    def _gated(self, name: str, x: torch.Tensor) -> torch.Tensor:
        gate, up = self._linear(name + ".gate_proj", x), self._linear(name + ".up_proj", x)
        return self._linear(name + ".down_proj", silu(gate) * up)

    def _moe(self, name: str, x: torch.Tensor) -> torch.Tensor:
        scores = self._linear(name + ".gate", x).softmax(-1)
        weights, chosen = scores.topk(self.config["num_experts_per_tok"])
        out = self._gated(name + ".shared_experts", x)
        for t in range(len(x)):
            for weight, expert in zip(weights[t], chosen[t].tolist(), strict=True):
                out[t] += weight * self._gated(f"{name}.experts.{expert}", x[t])
        return out

    def _attention(self, layer: str, x: torch.Tensor) -> torch.Tensor:
        n_tokens, n_head = len(x), self.config["num_attention_heads"]
        name = layer + "self_attn."
        q, k, v = (
            self._linear(f"{name}{kind}_proj", x).view(n_tokens, n_head, -1).transpose(0, 1)
            for kind in "qkv"
        )
        size = q.shape[-1]
        angles = torch.arange(n_tokens)[:, None] * self.config["rope_theta"] ** (
            -torch.arange(0, size, 2) / size
        )
        q, k = rotated(q, angles), rotated(k, angles)
        scores = q @ k.transpose(1, 2) / math.sqrt(size)
        later = torch.ones(n_tokens, n_tokens, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(later, -torch.inf).softmax(-1) @ v
        return self._linear(f"{name}o_proj", mixed.transpose(0, 1).reshape(n_tokens, -1))


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotary positions of [head, T, size]: dimension i turns with i + size / 2."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def build(n_vocab: int, seed: int = 7) -> DeepseekMoe:
    """Random weights of unit gain, rounded to half precision; routers have long rows."""
    generator = torch.Generator().manual_seed(seed)
    config = {**CONFIG, "vocab_size": n_vocab}
    weights: dict[str, torch.Tensor] = {}

    def matrix(name: str, rows: int, n: int, gain: float = 1.0) -> None:
        noise = torch.randn(rows, n, generator=generator) * gain / math.sqrt(n)
        weights[name + ".weight"] = noise.half().float()

    def norm(name: str) -> None:
        noise = 1 + 0.2 * torch.randn(config["hidden_size"], generator=generator)
        weights[name + ".weight"] = noise.half().float()

    def gated(name: str, n_ff: int) -> None:
        matrix(name + ".gate_proj", n_ff, n_embd)
        matrix(name + ".up_proj", n_ff, n_embd)
        matrix(name + ".down_proj", n_embd, n_ff)

    n_embd, n_ff = config["hidden_size"], config["moe_intermediate_size"]
    matrix("model.embed_tokens", n_vocab, n_embd)
    matrix("lm_head", n_vocab, n_embd)
    norm("model.norm")
    for il in range(config["num_hidden_layers"]):
        layer = f"model.layers.{il}."
        norm(layer + "input_layernorm")
        norm(layer + "post_attention_layernorm")
        for kind in "qkvo":
            matrix(f"{layer}self_attn.{kind}_proj", n_embd, n_embd)
        if il < config["first_k_dense_replace"]:
            gated(layer + "mlp", config["intermediate_size"])
            continue
        matrix(layer + "mlp.gate", config["n_routed_experts"], n_embd, gain=8.0)
        gated(layer + "mlp.shared_experts", config["n_shared_experts"] * n_ff)
        for expert in range(config["n_routed_experts"]):
            gated(f"{layer}mlp.experts.{expert}", n_ff)
    return DeepseekMoe(config, weights)
