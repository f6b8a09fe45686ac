"""Checkpoints of small random models for each family, with tokenizers, and their logits by
transformers."""

import functools
import io
import json

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra `convert`")
pytest.importorskip("transformers", reason="needs the extra `convert`")

import sentencepiece
import torch
import transformers
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from gguf_tools.convert.pretokenizer import LLAMA3_SPLIT, QWEN2_SPLIT

from .families import END, FAMILIES, SPECIAL, TEXT, VOCAB

# Tokenizers that add a begin token.
BEGINS = ("llama3", "deepseek")


@functools.cache
def byte_level(kind):
    """A byte-level BPE with VOCAB tokens, with the pre-tokenizer of the family's own tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    if kind == "neox":
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        split = LLAMA3_SPLIT if kind in BEGINS else QWEN2_SPLIT
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(split), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        if kind in BEGINS:
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{END} $A", special_tokens=[(END, 0)]
            )
    tokenizer.decoder = decoders.ByteLevel()
    special, letters = [END, *SPECIAL.get(kind, ())], sorted(pre_tokenizers.ByteLevel.alphabet())
    sizes = {"vocab_size": VOCAB, "special_tokens": special, "initial_alphabet": letters}
    tokenizer.train_from_iterator([TEXT], trainers.BpeTrainer(show_progress=False, **sizes))
    return tokenizer


@functools.cache
def _gemma():
    """A character BPE with VOCAB tokens and byte fallback. A space is a character, and no token
    contains parts of two lines."""
    ends = [END, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token=None, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), behavior="isolated")
    tokenizer.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=ends, show_progress=False)
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END} $A", special_tokens=[(END, 0)]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def save_tokenizer(kind, folder):
    """Write the tokenizer's files with the family's class."""
    if kind == "sentencepiece":
        save_sentencepiece(folder)
        return
    own = {"qwen2": transformers.Qwen2Tokenizer, "neox": transformers.GPTNeoXTokenizer}
    made = _gemma() if kind == "gemma" else byte_level(kind)
    kind_of = own.get(kind, transformers.PreTrainedTokenizerFast)
    tokenizer = kind_of(tokenizer_object=made, bos_token=END, eos_token=END)
    tokenizer.save_pretrained(folder)
    if kind == "deepseek":  # published files have a field that transformers does not write
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "add_bos_token": True}))


def save_sentencepiece(folder):
    """tokenizer.model similar to Llama's: BPE with byte fallback and without normalization."""
    (folder / "tokenizer.model").write_bytes(_sentencepiece())
    config = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "legacy": False}
    config |= {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@functools.cache
def _sentencepiece():
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines() * 8),
        model_writer=out,
        vocab_size=VOCAB,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.99,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return out.getvalue()


def write_checkpoint(name, folder, **save):
    """Write a family's checkpoint into `folder` and return its model."""
    family = FAMILIES[name]
    model = family.build()
    model.save_pretrained(folder, **save)
    if family.publish is not None:
        family.publish(folder)
    save_tokenizer(family.tokenizer, folder)
    if family.adapt is not None:
        family.adapt(model)
    return model


def their_tokens(name, folder, text):
    """Tokens of a text by the original tokenizer library."""
    if FAMILIES[name].tokenizer == "sentencepiece":
        processor = sentencepiece.SentencePieceProcessor(str(folder / "tokenizer.model"))
        return [processor.bos_id(), *processor.encode(text)]
    found = transformers.AutoTokenizer.from_pretrained(folder)(text).input_ids
    return found


def reference_logits(model, tokens):
    """Logits [T, vocab] of the model in float32, computed without a KV cache."""
    with torch.inference_mode():
        return np.asarray(model(torch.tensor([tokens]), use_cache=False).logits[0].float())
