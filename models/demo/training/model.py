"""The demo model in torch: a Qwen3-MoE language model for training on a CPU.

Parameters are float32. Matrix products use bfloat16. The experts of a layer are two stacked
tensors, `gate_up` [E, d, 2f] and `down` [E, f, d]. Each expert's matrix is therefore contiguous,
and a step needs two products per expert and direction (`products.py`). `export.py` converts the
parameters to the names and shapes of a Hugging Face checkpoint.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.demo.training.kernels import Kernels, rms_norm
from models.demo.training.products import AttentionFunction, ExpertsFunction, HeadLoss


@dataclass(frozen=True)
class ModelConfig:
    """The shape of the model. Fields have the names of the Hugging Face configuration."""

    vocab_size: int = 6144
    hidden_size: int = 256
    num_layers: int = 8
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    num_experts: int = 16
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 256
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 1024
    aux_loss_coef: float = 0.01
    z_loss_coef: float = 1e-4

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        known = {f.name for f in fields(cls)}
        unknown = set(values) - known
        if unknown:
            raise ValueError(f"unknown model settings: {', '.join(sorted(unknown))}")
        return cls(**values)


class Layer(nn.Module):
    """The parameters of one decoder layer. All matrices are stored as [in, out]."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        d, f = cfg.hidden_size, cfg.moe_intermediate_size
        q, kv = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
        std, deep = d**-0.5, 1 / math.sqrt(2 * cfg.num_layers)
        self.norm_in = nn.Parameter(torch.ones(d))
        self.norm_post = nn.Parameter(torch.ones(d))
        self.q_norm = nn.Parameter(torch.ones(cfg.head_dim))
        self.k_norm = nn.Parameter(torch.ones(cfg.head_dim))
        self.qkv = nn.Parameter(torch.randn(d, q + 2 * kv) * std)
        self.out = nn.Parameter(torch.randn(q, d) * q**-0.5 * deep)
        self.router = nn.Parameter(torch.randn(d, cfg.num_experts) * 0.02)
        self.gate_up = nn.Parameter(torch.randn(cfg.num_experts, d, 2 * f) * std)
        self.down = nn.Parameter(torch.randn(cfg.num_experts, f, d) * f**-0.5 * deep)


class DemoModel(nn.Module):
    """The demo model in torch: an MoE decoder whose output matrix is its embedding matrix.

    Use `loss` for training and `logits` for evaluation.
    """

    def __init__(self, cfg: ModelConfig, *, compiled: bool = False) -> None:
        super().__init__()
        if cfg.num_experts > 256:
            raise ValueError("expert ids are sorted as bytes: at most 256 experts a layer")
        self.cfg = cfg
        self.kernels = Kernels(compiled)
        self.embed = nn.Parameter(torch.randn(cfg.vocab_size, cfg.hidden_size) * 0.02)
        self.layers = nn.ModuleList(Layer(cfg) for _ in range(cfg.num_layers))
        self.norm = nn.Parameter(torch.ones(cfg.hidden_size))
        pos = torch.arange(cfg.max_position_embeddings, dtype=torch.float32)
        freq = cfg.rope_theta ** -(
            torch.arange(0, cfg.head_dim, 2, dtype=torch.float32) / cfg.head_dim
        )
        angle = pos[:, None] * freq[None, :]
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def hidden(
        self, tokens: Tensor, doc: Tensor | None = None, dtype: torch.dtype = torch.bfloat16
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the final hidden states [B, T, d] of tokens [B, T].

        Also returns the balance loss (a scalar), and the share of tokens that each expert got [L,
        E].

        doc: [B, T], number of the document to which each token of a row belongs. A token attends
            only to earlier tokens of its own document.
        """
        cfg = self.cfg
        batch, length = tokens.shape
        k, experts = cfg.num_experts_per_tok, cfg.num_experts
        dims = (cfg.num_heads, cfg.num_kv_heads, cfg.head_dim, cfg.rms_norm_eps)
        causal = torch.ones(length, length, dtype=torch.bool).tril()[None]
        if doc is not None:
            causal = causal & (doc[:, :, None] == doc[:, None, :])
        mask = causal.to(dtype).expand(batch, length, length)
        cos, sin = self.cos[:length], self.sin[:length]
        x = F.embedding(tokens, self.embed).to(dtype)
        aux = torch.zeros(())
        loads = []
        for layer in self.layers:
            q, key, v = self.kernels.attention_in(
                x, layer.norm_in, layer.qkv.to(dtype), layer.q_norm, layer.k_norm, cos, sin, dims
            )
            a = AttentionFunction.apply(q, key, v, mask, self.kernels)
            x, h, router = self.kernels.attention_out(
                x, a, layer.out.to(dtype), layer.norm_post, layer.router, dims
            )
            router = router.view(-1, experts)
            prob = router.softmax(-1)
            top, ids = prob.topk(k, dim=-1)
            weight = top / top.sum(-1, keepdim=True)
            load = torch.bincount(ids.reshape(-1), minlength=experts).float() / ids.numel()
            aux = aux + cfg.aux_loss_coef * experts * (load * prob.mean(0)).sum()
            aux = aux + cfg.z_loss_coef * router.logsumexp(-1).pow(2).mean()
            loads.append(load)
            moe = ExpertsFunction.apply(
                h.view(-1, cfg.hidden_size), ids, weight,
                layer.gate_up.to(dtype), layer.down.to(dtype), self.kernels,
            )  # fmt: skip
            x = x + moe.view_as(x)
        return rms_norm(x, self.norm, cfg.rms_norm_eps), aux / cfg.num_layers, torch.stack(loads)

    def loss(
        self, tokens: Tensor, doc: Tensor, target: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the mean cross-entropy of the targets, weighted by `weight`.

        Also returns the balance loss, and the share of tokens that each expert got [L, E].
        """
        h, aux, load = self.hidden(tokens, doc)
        keep = weight.reshape(-1).nonzero().squeeze(-1)
        # Pad the rows to whole chunks, so that the compiled loss always gets the same shape.
        pad = -keep.numel() % HeadLoss.CHUNK
        w = weight.reshape(-1)[keep]
        w = F.pad(w / w.sum(), (0, pad))
        keep = F.pad(keep, (0, pad))
        rows = h.reshape(-1, h.shape[-1]).index_select(0, keep)
        goal = target.reshape(-1)[keep]
        loss = HeadLoss.apply(rows, self.embed.to(h.dtype), goal, w, self.kernels)
        return loss, aux, load

    @torch.no_grad()
    def logits(self, tokens: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return the float32 logits [B, T, V] of tokens [B, T]. `dtype` is the computing type."""
        h, _, _ = self.hidden(tokens, dtype=dtype)
        return h.float() @ self.embed.float().t()
