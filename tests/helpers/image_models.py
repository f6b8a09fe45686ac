"""Tiny random models with image encoders, converted by upstream's converter, and images for them.

    python tests/helpers/image_models.py FOLDER       writes all models and images, for other uses

Each model consists of a GGUF model with experts and a GGUF file with the image encoder, which
llama.cpp calls mmproj. Each token of an answer is a printable ASCII character: other tokens are
never the best ones. So an answer has as many characters as tokens were asked for.
"""

import io
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra `convert`")
pytest.importorskip("transformers", reason="needs the extra `convert`")

import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from gguf_tools.convert import convert, upstream
from gguf_tools.convert.pretokenizer import LLAMA3_SPLIT, QWEN2_SPLIT

END = "<|endoftext|>"
TEMPLATE = (
    "{% for message in messages %}BEFORE{{ message.role }}AFTER"
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}"
    "CLOSE\n{% endfor %}{% if add_generation_prompt %}BEFOREassistantAFTER{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """A family of models with image encoders, and how a tiny one is made.

    name: transformers' class, without `ForConditionalGeneration`.
    text: settings of the text model that SIZES lacks or that differ.
    vision: settings of the image encoder.
    tokenizer: returns the tokenizer for a list of special tokens.
    turn: texts before the role, between role and content, and after the content of a message.
    special: further special tokens: before an image, after it, and instead of its tokens.
    gains: factors for weights of the text model, by parts of their names. They are chosen so that
        answers do not repeat one token.
    publish: changes the tensors to the published form if transformers writes another form.
    """

    name: str
    text: dict[str, Any]
    vision: dict[str, Any]
    tokenizer: Callable[[list[str]], Tokenizer]
    turn: tuple[str, str, str]
    special: tuple[str, str, str]
    gains: dict[str, float] = field(default_factory=dict)
    publish: Callable[[dict[str, Any]], dict[str, Any]] = dict


def byte_level(split: str) -> Callable[[list[str]], Tokenizer]:
    """Return a function that makes a tokenizer whose tokens are bytes."""

    def make(special: list[str]) -> Tokenizer:
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        # llama.cpp requires at least one merge.
        vocab = {text: i for i, text in enumerate([*special, *letters, "Ġa"])}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("Ġ", "a")]))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(split), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    return make


def with_byte_fallback(special: list[str]) -> Tokenizer:
    """Make a tokenizer of ASCII characters. Other characters are split into their bytes."""
    texts = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
    texts += ["\n", "\u2581", *map(chr, range(33, 127)), "\u2581a"]
    vocab = {text: i for i, text in enumerate(texts)}
    merges = [("\u2581", "a")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def with_columns_first(tensors: dict[str, Any]) -> dict[str, Any]:
    """Store experts as [experts, columns, rows]. transformers transposes them when loading."""
    return {
        name: values.transpose(1, 2).contiguous() if ".experts." in name else values
        for name, values in tensors.items()
    }


# fmt: off
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048, "bos_token_id": 0,
    "eos_token_id": 1, "pad_token_id": None, "tie_word_embeddings": False,
}
EXPERTS = {"moe_intermediate_size": 96, "num_experts": 8, "num_experts_per_tok": 2}
ENCODER = {"hidden_size": 32, "intermediate_size": 48}
# An image has a token for every 32 x 32 pixels, at least 8.
QWEN_ENCODER = {
    **ENCODER, "depth": 3, "num_heads": 2, "out_hidden_size": SIZES["hidden_size"],
    "num_position_embeddings": 16, "patch_size": 16, "spatial_merge_size": 2,
}
CHATML = ("<|im_start|>", "\n", "<|im_end|>")
FAMILIES = {
    # M-RoPE. Features of two layers of the encoder are added in the first layers of the model.
    "qwen3-vl-moe": Family(
        "Qwen3VLMoe",
        {
            **EXPERTS, "norm_topk_prob": True,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0,
                "mrope_section": [6, 5, 5], "mrope_interleaved": True,
            },
        },
        {**QWEN_ENCODER, "deepstack_visual_indexes": [0, 1]},
        byte_level(QWEN2_SPLIT), CHATML, ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>"),
        publish=with_columns_first,
    ),
    # M-RoPE, and recurrent layers.
    "qwen3.5-moe": Family(
        "Qwen3_5Moe",
        {
            **EXPERTS, "shared_expert_intermediate_size": 96, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
                "mrope_section": [3, 3, 2], "mrope_interleaved": True,
            },
        },
        QWEN_ENCODER,
        byte_level(QWEN2_SPLIT), CHATML, ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>"),
    ),
    # The tokens of an image attend to each other, so they are computed in one micro-batch. An image
    # has a token for every 48 x 48 pixels, at least 70.
    "gemma4": Family(
        "Gemma4",
        {
            "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2,
            "global_head_dim": 64, "hidden_size_per_layer_input": 0, "enable_moe_block": True,
            "moe_intermediate_size": 96, "num_experts": 8, "top_k_experts": 2,
            "final_logit_softcapping": 30.0, "use_bidirectional_attention": "vision",
            "tie_word_embeddings": True,
        },
        {
            **ENCODER, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
            "head_dim": 16, "patch_size": 16, "pooling_kernel_size": 3,
            "position_embedding_size": 4096,
        },
        with_byte_fallback, ("<|turn>", "\n", "<turn|>"), ("<|image>", "<image|>", "<|image|>"),
        gains={"post_attention_layernorm": 3.0},
    ),
    # A larger image is divided into up to 9 tiles, and followed by the whole image in one tile. A
    # tile has 16 tokens.
    "llama4": Family(
        "Llama4",
        {
            "num_local_experts": 8, "num_experts_per_tok": 1, "intermediate_size_mlp": 96,
            "interleave_moe_layer_step": 1, "attention_chunk_size": 256,
        },
        {
            # Upstream's converter needs three layers. The projector requires this intermediate
            # size: the product of the hidden size and the number of patches of a token.
            "hidden_size": 32, "intermediate_size": 32 * 4, "num_hidden_layers": 3,
            "num_attention_heads": 2, "image_size": 64, "patch_size": 8,
            "pixel_shuffle_ratio": 0.5, "vision_output_dim": 64, "projector_input_dim": 64,
            "projector_output_dim": 64,
        },
        byte_level(LLAMA3_SPLIT), ("<|header_start|>", "<|header_end|>\n\n", "<|eot|>"),
        ("<|image_start|>", "<|image_end|>", "<|patch|>"), gains={"embed_tokens": 12.0},
    ),
}
# fmt: on


def _quiet(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that are not one printable ASCII character."""
    printable = {"Ġ", "\u2581", *map(chr, range(33, 127))}  # the first two are spaces
    return [token for text, token in tokenizer.get_vocab().items() if text not in printable]


def _randomise(model: Any, quiet: list[int], gains: dict[str, float]) -> None:
    """Set random weights so that every part affects the logits.

    Matrices have unit gain. Norms and biases are not neutral. The router's rows are long, so
    rounding does not change the choice of experts. Attention is sharp, and recurrent layers forget
    slowly, so an image affects a long answer.

    quiet: tokens that are never the best ones, because their rows of the output matrix are short.
    gains: those of `Family`.
    """
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, values in sorted(model.named_parameters()):
            noise = torch.randn(values.shape, generator=generator)
            if values.dim() > 1:
                is_router = name.endswith(("gate.weight", "router.weight", "router.proj.weight"))
                n_inputs = values[0].numel() if values.dim() > 3 else values.shape[-1]
                values.copy_(noise * (8.0 if is_router else 1.0) / math.sqrt(n_inputs))
            elif name.endswith("A_log"):
                values.copy_(0.2 * noise - 3.0)
            elif "norm" in name or "bias" in name:
                values.add_(0.2 * noise)
            if name.endswith(("embed_tokens.weight", "lm_head.weight")):
                values[quiet] *= 0.05
            if "vision" not in name and "visual" not in name:
                for part, gain in {"q_norm": 2.0, "k_norm": 2.0, **gains}.items():
                    values.mul_(gain if part in name else 1.0)
            values.copy_(values.half().float())


def write_checkpoint(family: Family, folder: Path) -> None:
    """Write the checkpoint of a model with random weights, as it would be published."""
    before, after, close = family.turn
    marks = (END, close, before, after.strip(), *family.special)
    special = list(dict.fromkeys(each for each in marks if each))
    tokenizer = family.tokenizer(special)
    config_class = getattr(transformers, f"{family.name}Config")
    vision_class = getattr(transformers, f"{family.name}VisionConfig")
    torch.manual_seed(1)  # for weights that _randomise does not set
    config = config_class(
        text_config={**SIZES, **family.text, "vocab_size": tokenizer.get_vocab_size()},
        vision_config=vision_class(**family.vision),
        tie_word_embeddings=family.text.get("tie_word_embeddings", False),
        image_token_id=special.index(family.special[2]),
    )
    model = getattr(transformers, f"{family.name}ForConditionalGeneration")(config).eval()
    _randomise(model, _quiet(tokenizer), family.gains)
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    save_file(family.publish(load_file(path)), path, metadata={"format": "pt"})
    ends = {"bos_token": END, "eos_token": close, "extra_special_tokens": special}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends).save_pretrained(folder)
    template = TEMPLATE.replace("BEFORE", before).replace("AFTER", after).replace("CLOSE", close)
    (folder / "chat_template.jinja").write_text(template)
    processor = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


def write_model(name: str, folder: Path, tier: str = "f16") -> tuple[Path, Path]:
    """Write a family's model and image encoder, and return their paths.

    tier: type of the experts. The other weights of the model are float32, as in the checkpoint.
    """
    checkpoint = folder / "checkpoint"
    write_checkpoint(FAMILIES[name], checkpoint)
    model, mmproj = folder / "model.gguf", folder / "mmproj.gguf"
    convert(checkpoint, model, [tier], threads=1)
    _write_encoder(checkpoint, mmproj)
    return model, mmproj


def _write_encoder(checkpoint: Path, path: Path) -> None:
    """Write the image encoder, as the option --mmproj of upstream's converter does."""
    with upstream._loaded() as (conversion, base, gguf), torch.inference_mode():
        config = base.ModelBase.load_hparams(checkpoint, False)
        kind = base.ModelType.MMPROJ
        architecture = base.get_model_architecture(config, kind)
        model_class = conversion.get_model_class(architecture, mmproj=True)
        model_class(checkpoint, gguf.LlamaFileType.ALL_F32, path, hparams=config).write()


def _drawn(width: int, height: int, seed: int) -> Image.Image:
    """An image with a gradient, a disc and noise."""
    y, x = np.mgrid[:height, :width]
    disc = np.hypot(x - 0.6 * width, y - 0.4 * height) < 0.25 * min(width, height)
    planes = [255 * x / max(1, width - 1), 255 * y / max(1, height - 1), 200 * disc]
    noise = np.random.default_rng(seed).normal(0, 12, (height, width, 3))
    return Image.fromarray(np.clip(np.stack(planes, -1) + noise, 0, 255).astype(np.uint8))


def _encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def images() -> dict[str, bytes]:
    """Return five images in encoded form, by file name."""
    return {
        "dot.png": _encoded(Image.new("RGB", (1, 1), (250, 40, 90)), "PNG"),
        "square.jpg": _encoded(_drawn(64, 64, 1), "JPEG", quality=80),
        "wide.png": _encoded(_drawn(333, 97, 2).quantize(64), "PNG"),
        "tall.png": _encoded(_drawn(50, 200, 3).convert("L"), "PNG"),
        "large.jpg": _encoded(_drawn(640, 480, 4), "JPEG", quality=70, progressive=True),
    }


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    folder = Path(sys.argv[1]).resolve()
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for name, data in images().items():
        (folder / "images" / name).write_bytes(data)
    for name in FAMILIES:
        (folder / name).mkdir(exist_ok=True)
        for path in write_model(name, folder / name):
            print(f"{path}: {path.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[2])]
    main()
