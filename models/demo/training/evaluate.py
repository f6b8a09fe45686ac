"""Evaluate a checkpoint: held-out perplexity, answers to new phrasings, and sample dialogues.

`python -m models.demo.training.evaluate HF_DIR --data DIR [--gguf FILE]` runs the model in torch.
With `--gguf`, it uses the dequantized weights of an exported tier. This measures the quality loss
of the quantization with everything else equal.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from models.demo.training import facts
from models.demo.training.model import DemoModel, ModelConfig
from models.demo.training.sources import load_sources, records
from models.demo.training.tales import article
from models.demo.training.talk import (
    FINAL_WEIGHTS,
    TERM_HELD_OUT,
    TERM_QUESTIONS,
    Sources,
    chat_documents,
    render,
)
from models.demo.training.tokenizer import IM_END, load_tokenizer

DIALOGUES = (
    ("Hello!", "Who are you?", "What can you do?"),
    ("What is the capital of Norway?", "And what language do they speak there?"),
    ("Which continent is Peru in?", "Tell me about Japan."),
    ("What is photosynthesis?", "Define inflation.", "Thanks!"),
    ("Tell me a short story about a fox.",),
    ("Who won the world cup in 1998?", "What is 17 times 23?"),
    ("I'm a bit sad today.", "Tell me a joke."),
)


def load_hf(folder: Path, weights: dict[str, torch.Tensor] | None = None) -> DemoModel:
    """Load the model from a Hugging Face checkpoint that export.py wrote.

    `weights` replaces some of its tensors, by name.
    """
    raw = json.loads((folder / "config.json").read_text())
    cfg = ModelConfig(
        vocab_size=raw["vocab_size"], hidden_size=raw["hidden_size"],
        num_layers=raw["num_hidden_layers"], num_heads=raw["num_attention_heads"],
        num_kv_heads=raw["num_key_value_heads"], head_dim=raw["head_dim"],
        num_experts=raw["num_experts"], num_experts_per_tok=raw["num_experts_per_tok"],
        moe_intermediate_size=raw["moe_intermediate_size"], rope_theta=raw["rope_theta"],
        rms_norm_eps=raw["rms_norm_eps"],
        max_position_embeddings=raw["max_position_embeddings"],
    )  # fmt: skip
    t = {k: v.float() for k, v in (weights or load_file(folder / "model.safetensors")).items()}
    model = DemoModel(cfg)
    state = {"embed": t["model.embed_tokens.weight"], "norm": t["model.norm.weight"]}
    for n in range(cfg.num_layers):
        src, dst = f"model.layers.{n}.", f"layers.{n}."
        attn = src + "self_attn."
        state |= {
            dst + "norm_in": t[src + "input_layernorm.weight"],
            dst + "norm_post": t[src + "post_attention_layernorm.weight"],
            dst + "q_norm": t[attn + "q_norm.weight"],
            dst + "k_norm": t[attn + "k_norm.weight"],
            dst + "qkv": torch.cat([t[attn + f"{x}_proj.weight"] for x in "qkv"]).t(),
            dst + "out": t[attn + "o_proj.weight"].t(),
            dst + "router": t[src + "mlp.gate.weight"].t(),
        }
        pairs, downs = [], []
        for e in range(cfg.num_experts):
            x = f"{src}mlp.experts.{e}."
            pairs.append(torch.cat([t[x + "gate_proj.weight"], t[x + "up_proj.weight"]]).t())
            downs.append(t[x + "down_proj.weight"].t())
        state |= {dst + "gate_up": torch.stack(pairs), dst + "down": torch.stack(downs)}
    model.load_state_dict(state)
    model.eval()
    return model


def gguf_weights(path: Path) -> dict[str, torch.Tensor]:
    """Return the dequantized tensors of a GGUF file with one tier.

    The keys are the tensors' Hugging Face names.
    """
    from gguf import GGUFReader
    from gguf.quants import dequantize

    out: dict[str, torch.Tensor] = {}
    plain = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    layer = {
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
        "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj", "ffn_gate_inp": "mlp.gate",
    }  # fmt: skip
    for t in GGUFReader(path).tensors:
        value = torch.from_numpy(dequantize(t.data, t.tensor_type).copy())
        name = t.name.removesuffix(".weight")
        if name in plain:
            out[plain[name] + ".weight"] = value
        elif m := re.fullmatch(r"blk\.(\d+)\.ffn_(gate|up|down)_exps", name):
            for e, part in enumerate(value):
                out[f"model.layers.{m[1]}.mlp.experts.{e}.{m[2]}_proj.weight"] = part
        elif (m := re.fullmatch(r"blk\.(\d+)\.(\w+)", name)) and m[2] in layer:
            out[f"model.layers.{m[1]}.{layer[m[2]]}.weight"] = value
    return out


class Chat:
    """Answers prompts with the torch model, decoded greedily.

    It has no KV cache, so it recomputes the whole text for each token.
    """

    def __init__(self, model: DemoModel, tok: Tokenizer, dtype: torch.dtype) -> None:
        self.model, self.tok, self.dtype = model, tok, dtype
        self.end = tok.token_to_id(IM_END)

    def prompt(self, turns: list[tuple[str, str]], question: str) -> list[int]:
        pieces = [text for text, _ in render(turns)]
        pieces.append(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
        return [i for e in self.tok.encode_batch(pieces) for i in e.ids]

    def answer(self, question: str, turns: list[tuple[str, str]], limit: int = 60) -> str:
        return self.answers([self.prompt(turns, question)], limit)[0]

    def answers(self, prompts: list[list[int]], limit: int = 60) -> list[str]:
        """Return the answers to all prompts, of at most `limit` tokens, decoded in one batch."""
        rows = [list(p) for p in prompts]
        start = [len(r) for r in rows]
        open_rows = set(range(len(rows)))
        for _ in range(limit):
            if not open_rows:
                break
            live = sorted(open_rows)
            width = max(len(rows[i]) for i in live)
            batch = torch.zeros(len(live), width, dtype=torch.long)
            for n, i in enumerate(live):
                batch[n, : len(rows[i])] = torch.tensor(rows[i])
            with torch.no_grad():
                h, _, _ = self.model.hidden(batch, dtype=self.dtype)
                last = h[torch.arange(len(live)), torch.tensor([len(rows[i]) - 1 for i in live])]
                best = (last.float() @ self.model.embed.t()).argmax(-1).tolist()
            for i, token in zip(live, best, strict=True):
                if token == self.end or len(rows[i]) >= self.model.cfg.max_position_embeddings - 1:
                    open_rows.discard(i)
                else:
                    rows[i].append(token)
        return [self.tok.decode(r[s:]) for r, s in zip(rows, start, strict=True)]


@torch.no_grad()
def perplexity(
    model: DemoModel,
    docs: Iterable[tuple[list[int], list[bool]]],
    dtype: torch.dtype,
    length: int = 512,
) -> float:
    """Return the perplexity of a model on documents: exp of the mean loss.

    A document is (tokens, flags). Only flagged tokens count. Each document is evaluated separately.
    """
    total, count = 0.0, 0
    for ids, learn in docs:
        ids, learn = ids[:length], learn[:length]
        if sum(learn[1:]) == 0:
            continue
        logits = model.logits(torch.tensor([ids]), dtype)[0, :-1]
        nll = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
        keep = torch.tensor(learn[1:])
        total += float(nll[keep].sum())
        count += int(keep.sum())
    return math.exp(total / max(count, 1))


Document = tuple[list[int], list[bool]]


def held_out_chat(sources: Sources, tok: Tokenizer, count: int) -> list[Document]:
    """Generate conversations like those of the training, with a seed that it never used.

    Returns them as documents for `perplexity`.
    """
    out = []
    for doc in chat_documents(sources, 990_001, count, FINAL_WEIGHTS, 0.5):
        ids: list[int] = []
        learn: list[bool] = []
        for e, (_, flag) in zip(tok.encode_batch([t for t, _ in doc]), doc, strict=True):
            ids += e.ids
            learn += [flag] * len(e.ids)
        out.append((ids, learn))
    return out


def held_out_stories(data: Path, tok: Tokenizer, count: int) -> list[Document]:
    texts = [r["text"] for r in records(data, "valid/stories_ccby")][:count]
    return [(e.ids, [True] * len(e.ids)) for e in tok.encode_batch(texts)]


def accuracy(
    chat: Chat, cases: list[tuple[str, Callable[[str], bool]]], batch: int = 32
) -> tuple[float, list[tuple[str, str]]]:
    """Ask questions, and return the share of correct answers and the wrong answers.

    A case is (question, function that checks the answer). A wrong answer is (question, answer).
    """
    wrong = []
    for s in range(0, len(cases), batch):
        part = cases[s : s + batch]
        answers = chat.answers([chat.prompt([], q) for q, _ in part], 48)
        for (q, right), a in zip(part, answers, strict=True):
            if not right(a):
                wrong.append((q, a))
    return 1 - len(wrong) / max(len(cases), 1), wrong


def cases(
    sources: Sources, seed: int, limit: int, *, held_out: bool = True
) -> dict[str, list[tuple[str, Any]]]:
    """Return questions by kind, each with a function that checks the answer.

    With held_out=True, the questions have phrasings that the training never showed. Otherwise they
    have the phrasings of the training. Each kind has at most `limit` questions.
    """
    rng = random.Random(seed)
    term_asks = TERM_HELD_OUT if held_out else TERM_QUESTIONS

    def holds(value: str) -> Callable[[str], bool]:
        return lambda a: value.lower() in a.lower()

    out: dict[str, list[tuple[str, Any]]] = {}
    for kind in facts.HELD_OUT:
        asks = (facts.HELD_OUT if held_out else facts.QUESTIONS)[kind]
        out[kind] = []
        for c in sources.countries:
            if kind not in c.answers:
                continue
            q = rng.choice(asks).format(c=c.shown, v=c.capital)
            goal = {"capital": c.capital, "country_of": c.shown}.get(kind) or c.answers[kind]
            out[kind].append((q, holds(goal)))
    out["glossary"] = [
        (rng.choice(term_asks).format(t=t, a=f"{article(t)} {t}"), holds(a))
        for t, a in sources.glossary
    ]
    return {k: rng.sample(v, min(limit, len(v))) for k, v in out.items()}


def unknown_cases(data: Path, limit: int) -> list[tuple[str, Any]]:
    """Return questions that the model should decline to answer, with a check of the answer.

    They are from parts of the text collection that the training does not use.
    """
    rng = random.Random(5)
    found = []
    for name in ("valid/sft_dolly", "eval/opentriviaqa_heldout"):
        asked = [r.get("question") or r["messages"][0]["content"] for r in records(data, name)]
        asked = [q for q in asked if len(q) < 160]
        found += rng.sample(asked, min(limit // 2, len(asked)))
    return [(q, _is_refusal) for q in found]


def _is_refusal(answer: str) -> bool:
    return bool(re.search(r"don't know|can't|outside of what I know|small demo model", answer))


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        prog="python -m models.demo.training.evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("hf_dir", type=Path)
    p.add_argument("--data", type=Path, required=True)
    p.add_argument("--gguf", type=Path, help="use the weights of this single-tier GGUF")
    p.add_argument("--limit", type=int, default=200, help="number of questions of each kind")
    p.add_argument("--documents", type=int, default=300, help="number of documents for perplexity")
    p.add_argument("--float32", action="store_true", help="compute in float32 instead of bfloat16")
    p.add_argument("--only", choices=("perplexity", "accuracy", "samples"))
    args = p.parse_args(argv)
    dtype = torch.float32 if args.float32 else torch.bfloat16
    model = load_hf(args.hf_dir, gguf_weights(args.gguf) if args.gguf else None)
    tok = load_tokenizer(args.hf_dir)
    chat = Chat(model, tok, dtype)
    if args.only != "samples":
        sources = load_sources(args.data)
    if args.only in (None, "perplexity"):
        for name, docs in (
            ("chat", held_out_chat(sources, tok, args.documents)),
            ("stories", held_out_stories(args.data, tok, args.documents // 4)),
        ):
            print(f"perplexity {name}: {perplexity(model, docs, dtype):.3f}", flush=True)
    if args.only in (None, "accuracy"):
        for held_out in (True, False):
            print(
                "phrasings that training never shows:" if held_out else "phrasings of the training:"
            )
            asked_by_kind = cases(sources, 5, args.limit, held_out=held_out)
            if held_out:
                asked_by_kind["refusals"] = unknown_cases(args.data, args.limit)
            for kind, asked in asked_by_kind.items():
                share, wrong = accuracy(chat, asked)
                print(f"  {kind}: {share:.3f} of {len(asked)}", flush=True)
                for q, a in wrong[:3]:
                    print(f"    {q!r} -> {a!r}")
    if args.only in (None, "samples"):
        for questions in DIALOGUES:
            turns: list[tuple[str, str]] = []
            for q in questions:
                a = chat.answer(q, turns, 220)
                turns.append((q, a))
                print(f"> {q}\n{a}")
            print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
