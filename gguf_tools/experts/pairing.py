"""Check that two files are the same model in different precisions."""

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
    """Check that the model `low` can add lower precisions (tiers) to the model `high`.

    Raises MismatchError if they are not the same model, if `low` is not less precise, or if they
    have more than MAX_TIERS tiers together.
    """
    check_same(high, low)
    if len(high.tiers) + len(low.tiers) > MAX_TIERS:
        raise MismatchError(
            f"{low.path}: the two files have {len(high.tiers)} and {len(low.tiers)} tiers, but at"
            f" most {MAX_TIERS} can be used together: use `moe-edge export` to make a file with one"
            " tier"
        )
    if low.tiers[0].bpw == high.tiers[-1].bpw:
        raise MismatchError(
            f"{low.path}: the same precision as {high.path}, {low.tiers[0].bpw:.2f} bits per"
            " weight: choose a file of lower precision for --low"
        )
    if low.tiers[0].bpw > high.tiers[-1].bpw:
        raise MismatchError(
            f"{low.path}: {low.tiers[0].bpw:.2f} bits per weight, not below the"
            f" {high.tiers[-1].bpw:.2f} of {high.path}: swap the two files"
        )


def check_same(high: "ExpertModel", low: "ExpertModel") -> None:
    """Raise MismatchError if two files are not the same model in different precisions.

    The message names the first difference in architecture, layers, experts, matrix shapes,
    hyperparameters or tokenizer. A fine-tuned model differs from its base only in its weights.
    Therefore the routers of the first and last MoE layer are compared, too, if both files store
    them in the same type.
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
            f"{low.path}: not the same model as {high.path}: {what}: {_short(b)}, but"
            f" {_short(a)} in {high.path.name}"
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
            f"{low.path}: not the same model as {high.path}: the routers {name} differ (is one of"
            " them a fine-tune, or another version?)"
        )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
