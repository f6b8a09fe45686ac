"""Check a model's header for values that make llama.cpp abort the process or compute NaN."""

import math
from collections.abc import Iterator
from typing import Any

from gguf_tools import errors
from gguf_tools.experts.hparams import Hyperparameters
from gguf_tools.file.layout import GGMLType
from gguf_tools.file.reader import GGUFFile, metadata_value

_ROPE_SCALING = ("none", "linear", "yarn", "longrope")
_EPSILONS = (
    "attention.layer_norm_epsilon",
    "attention.layer_norm_rms_epsilon",
    "attention.group_norm_epsilon",
)
_ROPE_BASES = ("rope.freq_base", "rope.freq_base_swa")
# Types that ggml's addition supports, which one-dimensional tensors and norms must therefore have.
_VECTOR_TYPES = (GGMLType.F32, GGMLType.I8, GGMLType.I16, GGMLType.I32, GGMLType.I64)

_TOKENS, _TOKENIZER = "tokenizer.ggml.tokens", "tokenizer.ggml.model"


def check_loadable(parts: list[GGUFFile], hparams: Hyperparameters) -> None:
    """Check for values that would make llama.cpp abort the process or compute only NaN.

    parts: the files of the model. The first file has the metadata.
    Raises MetadataError, which names the key, or TensorTypeError, which names the tensor.
    """
    first = parts[0]
    keys = _Keys(first, hparams.arch)
    keys.check_finite()
    for name in _EPSILONS:
        keys.check(name, lambda value: value >= 0, "0 or more")
    for name in _ROPE_BASES:
        keys.check(name, lambda value: value > 0, "more than 0")
    _check_rope(keys, hparams)
    _check_groups(keys, hparams)
    _check_vocabulary(first)
    _check_vectors(parts)


class _Keys:
    """Reads metadata values of a model's architecture.

    The methods get the part of a metadata key after the architecture's name. For example,
    "block_count" stands for `llama.block_count` in a model of the architecture llama.
    """

    def __init__(self, file: GGUFFile, arch: str) -> None:
        self._file, self._prefix = file, f"{arch}."

    def get(self, name: str, kind: type | tuple[type, ...], default: Any) -> Any:
        return metadata_value(self._file, self._prefix + name, kind, default)

    def fail(self, name: str, text: str) -> errors.MetadataError:
        return errors.MetadataError(f"{self._file.path}: key {self._prefix}{name}: {text}")

    def check(self, name: str, is_right: Any, expected: str) -> None:
        """Raise MetadataError if the file stores a wrong number under a key.

        is_right: function that returns whether a number is right.
        expected: description of a right number, for the message.
        """
        value = self.get(name, (int, float), None)
        if value is not None and not is_right(value):
            raise self.fail(name, f"the value is {value}, expected {expected}")

    def check_finite(self) -> None:
        """Raise MetadataError if any metadata number of the architecture is NaN or infinite."""
        for key, value in self._file.metadata.items():
            if key.startswith(self._prefix):
                for number in value if isinstance(value, list) else (value,):
                    if isinstance(number, float) and not math.isfinite(number):
                        name = key.removeprefix(self._prefix)
                        raise self.fail(name, f"the value is {number}, expected a finite number")


def _check_rope(keys: _Keys, hparams: Hyperparameters) -> None:
    longest = max(hparams.key_length, keys.get("attention.key_length_swa", int, 0))
    for name in ("rope.dimension_count", "rope.dimension_count_swa"):
        keys.check(
            name,
            lambda value: 0 <= value <= longest and value % 2 == 0,
            f"an even number of at most {longest}, the length of an attention key",
        )
    scaling = keys.get("rope.scaling.type", str, "none")
    if scaling not in _ROPE_SCALING:
        raise keys.fail(
            "rope.scaling.type",
            f"the value is {scaling!r:.80}, expected one of {', '.join(_ROPE_SCALING)}",
        )


def _check_groups(keys: _Keys, hparams: Hyperparameters) -> None:
    groups = keys.get("expert_group_count", int, 0)
    if not 0 <= groups < hparams.n_expert or (groups and hparams.n_expert % groups):
        raise keys.fail(
            "expert_group_count",
            f"the value is {groups}, expected a divisor of {hparams.n_expert} experts",
        )
    used = keys.get("expert_group_used_count", int, 0)
    if groups > 1 and not 1 <= used < groups:
        raise keys.fail(
            "expert_group_used_count", f"the value is {used}, expected 1 to {groups - 1}"
        )


def _check_vocabulary(file: GGUFFile) -> None:
    tokens = metadata_value(file, _TOKENS, list, [])
    model = metadata_value(file, _TOKENIZER, str, "none")
    if model == "none" or not tokens:
        return
    known = set(tokens)
    # llama.cpp replaces empty tokens by distinct names, so they may repeat.
    n_empty = tokens.count("")
    if len(known) - (n_empty > 0) + n_empty < len(tokens):
        again = next(_repeated(tokens))
        raise errors.MetadataError(
            f"{file.path}: key {_TOKENS}: token {again} occurs twice: {tokens[again]!r:.80}"
        )
    if model == "llama" and "<0x0A>" not in known and "\n" not in known:
        raise errors.MetadataError(
            f"{file.path}: key {_TOKENIZER}: 'llama', but the vocabulary has no line feed token"
            " (<0x0A>): the tokenizer is of another kind, such as 'gpt2'"
        )


def _repeated(tokens: list[str]) -> Iterator[int]:
    """Yield the IDs of tokens that have the same text as an earlier token."""
    seen = {""}
    for number, token in enumerate(tokens):
        if token and token in seen:
            yield number
        seen.add(token)


def _check_vectors(parts: list[GGUFFile]) -> None:
    for part in parts:
        for name, info in part.tensors.items():
            is_vector = len(info.shape) == 1 or name.endswith("_norm.weight")
            if is_vector and info.type not in _VECTOR_TYPES:
                raise errors.TensorTypeError(
                    f"{part.path}: tensor {name}: type {info.type.name}, expected F32, the only"
                    " type that llama.cpp supports here: convert the model again"
                )
