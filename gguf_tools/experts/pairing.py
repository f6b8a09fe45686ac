"""Whether two files are one model in two precisions; if not, their first difference in words."""

from typing import TYPE_CHECKING, Any

from gguf_tools.errors import MismatchError
from gguf_tools.file.layout import KINDS, MAX_TIERS

if TYPE_CHECKING:
    from gguf_tools.experts.model import ExpertModel

_HYPERPARAMETERS = (
    "block_count",
    "embedding_length",
    "expert_count",
    "expert_used_count",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
)
_TOKENIZER = ("tokenizer.ggml.model", "tokenizer.ggml.tokens", "tokenizer.ggml.merges")


def check_pair(high: "ExpertModel", low: "ExpertModel") -> None:
    """Raise MismatchError unless two opened models are one, as ``check_same`` says, the low one
    less precise, and together they have MAX_TIERS tiers at most."""
    check_same(high, low)
    if len(high.tiers) + len(low.tiers) > MAX_TIERS:
        raise MismatchError(
            f"{low.path}: {len(high.tiers)} tiers and {len(low.tiers)}, but at most {MAX_TIERS} go"
            " together: `moe-edge export` makes a file of one"
        )
    if low.tiers[0].bpw == high.tiers[-1].bpw:
        raise MismatchError(
            f"{low.path}: the same precision as {high.path}, {low.tiers[0].bpw:.2f} bits per"
            " weight; --low adds a lower one"
        )
    if low.tiers[0].bpw > high.tiers[-1].bpw:
        raise MismatchError(
            f"{low.path}: {low.tiers[0].bpw:.2f} bits per weight, not below the"
            f" {high.tiers[-1].bpw:.2f} of {high.path}; swap the two files"
        )


def check_same(high: "ExpertModel", low: "ExpertModel") -> None:
    """Raise MismatchError with the first difference between two opened models.

    Architecture, layers, experts, matrix shapes, hyperparameters and tokenizer are compared. So
    are the routers of the first and last MoE layer where both files keep them in one type, since
    a fine-tune has the same shapes as its base, but not the same routers.
    """
    for what, of_high, of_low in (
        ("architecture", high.hparams.arch, low.hparams.arch),
        ("MoE layers", high.layer_ids, low.layer_ids),
        ("experts", high.n_expert, low.n_expert),
        ("experts per token", high.n_expert_used, low.n_expert_used),
    ):
        _same(high, low, what, of_high, of_low)
    for layer, il in enumerate(high.layer_ids):
        for kind, kind_name in enumerate(KINDS):
            what = f"shape of {kind_name} in layer {il}"
            _same(high, low, what, high.shapes[layer][kind], low.shapes[layer][kind])
    for key in _HYPERPARAMETERS:
        name = f"{high.hparams.arch}.{key}"
        _same(high, low, f"key {name}", high.metadata.get(name), low.metadata.get(name))
    for key in _TOKENIZER:
        _same_tokenizer(high, low, key)
    for il in (high.layer_ids[0], high.layer_ids[-1]):
        _same_bytes(high, low, f"blk.{il}.ffn_gate_inp.weight")


def _same(high: "ExpertModel", low: "ExpertModel", what: str, a: Any, b: Any) -> None:
    if a != b:
        raise MismatchError(
            f"{low.path}: not the model of {high.path}: {what} {_short(b)} here, {_short(a)} there"
        )


def _same_tokenizer(high: "ExpertModel", low: "ExpertModel", key: str) -> None:
    a, b = high.metadata.get(key), low.metadata.get(key)
    if isinstance(a, list) and isinstance(b, list):
        _same(high, low, f"length of {key}", len(a), len(b))
        for index, (of_high, of_low) in enumerate(zip(a, b, strict=True)):
            _same(high, low, f"{key}[{index}]", of_high, of_low)
    else:
        _same(high, low, f"key {key}", a, b)


def _same_bytes(high: "ExpertModel", low: "ExpertModel", name: str) -> None:
    parts = [part for part in (*high.parts, *low.parts) if name in part.tensors]
    if len(parts) != 2 or parts[0].tensors[name].type != parts[1].tensors[name].type:
        return
    if parts[0].array(name).tobytes() != parts[1].array(name).tobytes():
        raise MismatchError(
            f"{low.path}: not the model of {high.path}: the routers {name} differ"
            " (another fine-tune or version of the same base?)"
        )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
