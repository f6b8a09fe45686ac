"""Export the trained model as a Hugging Face checkpoint of the Qwen3-MoE architecture."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from models.demo.training.model import DemoModel, ModelConfig
from models.demo.training.tokenizer import END_OF_TEXT, IM_END, load_tokenizer, save_tokenizer


def tensors(model: DemoModel) -> dict[str, torch.Tensor]:
    """Return the parameters of a model by their Hugging Face names, as [out, in] matrices."""
    cfg = model.cfg
    q, kv = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
    out = {"model.embed_tokens.weight": model.embed, "model.norm.weight": model.norm}
    for n, layer in enumerate(model.layers):
        base = f"model.layers.{n}."
        wq, wk, wv = layer.qkv.split([q, kv, kv], dim=1)
        out |= {
            base + "input_layernorm.weight": layer.norm_in,
            base + "post_attention_layernorm.weight": layer.norm_post,
            base + "self_attn.q_proj.weight": wq.t(),
            base + "self_attn.k_proj.weight": wk.t(),
            base + "self_attn.v_proj.weight": wv.t(),
            base + "self_attn.o_proj.weight": layer.out.t(),
            base + "self_attn.q_norm.weight": layer.q_norm,
            base + "self_attn.k_norm.weight": layer.k_norm,
            base + "mlp.gate.weight": layer.router.t(),
        }
        gate, up = layer.gate_up.chunk(2, dim=2)
        for e in range(cfg.num_experts):
            expert = f"{base}mlp.experts.{e}."
            out[expert + "gate_proj.weight"] = gate[e].t()
            out[expert + "up_proj.weight"] = up[e].t()
            out[expert + "down_proj.weight"] = layer.down[e].t()
    return out


def hf_config(cfg: ModelConfig, tok: Tokenizer) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.hidden_size,
        "intermediate_size": cfg.moe_intermediate_size * cfg.num_experts_per_tok,
        "moe_intermediate_size": cfg.moe_intermediate_size,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": cfg.num_heads,
        "num_key_value_heads": cfg.num_kv_heads,
        "head_dim": cfg.head_dim,
        "num_experts": cfg.num_experts,
        "num_experts_per_tok": cfg.num_experts_per_tok,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": cfg.rms_norm_eps,
        "rope_theta": cfg.rope_theta,
        "max_position_embeddings": cfg.max_position_embeddings,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "router_aux_loss_coef": cfg.aux_loss_coef,
        "eos_token_id": tok.token_to_id(IM_END),
        "pad_token_id": tok.token_to_id(END_OF_TEXT),
        "bos_token_id": None,
        "torch_dtype": "float16",
    }


def export(model: DemoModel, tok: Tokenizer, out: Path) -> None:
    """Write a model to the folder `out` as a Hugging Face checkpoint.

    It has the configuration, float16 weights, the tokenizer and the chat template.
    """
    cfg = model.cfg
    save_tokenizer(tok, out, cfg.max_position_embeddings)
    config = json.dumps(hf_config(cfg, tok), indent=2)
    (out / "config.json").write_text(config + "\n", encoding="utf-8")
    generation = {"eos_token_id": tok.token_to_id(IM_END), "do_sample": False}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    weights = {k: v.detach().half().contiguous() for k, v in tensors(model).items()}
    part = out / "model.safetensors.part"
    save_file(weights, part, metadata={"format": "pt"})
    part.replace(out / "model.safetensors")


def load_checkpoint(path: Path) -> DemoModel:
    """Load the model from a checkpoint of the training. Its optimizer state is ignored."""
    state = torch.load(path, weights_only=False)
    model = DemoModel(ModelConfig.from_dict(state["config"]))
    model.load_state_dict(state["model"])
    return model


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        prog="python -m models.demo.training.export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("checkpoint", type=Path, help="checkpoint.pt of the training")
    p.add_argument("tokenizer", type=Path, help="folder with tokenizer.json (the training's cache)")
    p.add_argument("out", type=Path)
    args = p.parse_args(argv)
    export(load_checkpoint(args.checkpoint), load_tokenizer(args.tokenizer), args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
