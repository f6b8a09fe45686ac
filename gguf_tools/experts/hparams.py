"""The hyperparameters of a model, read from its metadata and checked."""

from dataclasses import dataclass
from typing import Any

from gguf_tools import errors
from gguf_tools.file.layout import (
    FORMAT_VERSION,
    KEY_FORMAT_VERSION,
    KEY_PREFIX,
    KEY_TIERS,
    MAX_TIERS,
)
from gguf_tools.file.parse import TensorInfo
from gguf_tools.file.reader import GGUFFile, architecture, metadata_value

MAX_NUMBER = 1 << 24
MAX_LAYERS = 4096
MAX_CONTEXT = 1 << 40

# What a router makes of its logits, as the key expert_gating_func has it.
SOFTMAX, SIGMOID = 1, 2
# Architectures whose graph has the sigmoid whatever the metadata says, and those that have it where
# the metadata says nothing. All others have the softmax then.
_ALWAYS_SIGMOID = frozenset(("llama4", "mimo2", "nemotron_h_moe"))
_SIGMOID_UNSAID = frozenset(
    ("afmoe", "cohere2moe", "glm-dsa", "glm4moe", "glm5-next", "hy_v3", "laguna", "step35")
)


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """What the metadata says of a model's shape.

    ``block_count`` counts all layers; ``routed_blocks`` leaves out those at the end that predict
    further tokens. ``n_expert_used`` is the most of any layer, where layers differ. ``n_head``
    and ``n_head_kv`` have one number per layer. ``is_mla`` is true of latent attention. ``gating``
    is what a router makes of its logits: SOFTMAX, SIGMOID, or another number of llama.cpp's.
    """

    arch: str
    block_count: int
    routed_blocks: int
    context_length: int
    embedding_length: int
    n_expert: int
    n_expert_used: int
    n_head: tuple[int, ...]
    n_head_kv: tuple[int, ...]
    key_length: int
    value_length: int
    is_mla: bool
    gating: int

    @classmethod
    def read(cls, file: GGUFFile, expert: TensorInfo) -> "Hyperparameters":
        """The record of a model whose first file this is.

        expert: an expert tensor of it, which says how many experts there are where the metadata
        does not. Raises MissingKeyError and MetadataError.
        """
        keys = _Keys(file)
        blocks = keys.positive("block_count", MAX_LAYERS)
        n_expert = keys.expert_count(expert)
        embedding_length = keys.positive("embedding_length")
        n_head = keys.per_layer("attention.head_count", blocks, [1])
        head_length = embedding_length // max(1, max(n_head))
        return cls(
            arch=keys.arch,
            block_count=blocks,
            routed_blocks=keys.routed_blocks(),
            context_length=keys.number("context_length", 0, MAX_CONTEXT),
            embedding_length=embedding_length,
            n_expert=n_expert,
            n_expert_used=keys.expert_used(blocks, n_expert),
            n_head=tuple(n_head),
            n_head_kv=tuple(keys.per_layer("attention.head_count_kv", blocks, n_head)),
            key_length=keys.number("attention.key_length", head_length),
            value_length=keys.number("attention.value_length", head_length),
            is_mla=f"{keys.arch}.attention.key_length_mla" in file.metadata,
            gating=keys.gating(),
        )


def routed_blocks(file: GGUFFile) -> int:
    """How many layers the model proper has: those behind them predict further tokens, and are
    left alone. Raises GGUFError."""
    return _Keys(file).routed_blocks()


def announced_tiers(file: GGUFFile) -> list[str]:
    """Tier names of a packed file, best first; one empty name for an ordinary file."""
    if not any(key.startswith(KEY_PREFIX) for key in file.metadata):
        return [""]
    version = metadata_value(file, KEY_FORMAT_VERSION, int, None)
    if version is None:
        raise _missing(file, KEY_FORMAT_VERSION)
    if version != FORMAT_VERSION:
        raise errors.VersionError(
            f"{file.path}: key {KEY_FORMAT_VERSION}: {version}; this version reads {FORMAT_VERSION}"
        )
    names = metadata_value(file, KEY_TIERS, list, None)
    if names is None:
        raise _missing(file, KEY_TIERS)
    valid = all(
        isinstance(name, str) and name == name.lower() and name and name.isprintable()
        for name in names
    )
    if not valid or not 1 <= len(names) <= MAX_TIERS or len(set(names)) != len(names):
        raise errors.MetadataError(
            f"{file.path}: key {KEY_TIERS}: {names!r:.200}; expected 1 to {MAX_TIERS} different"
            " lower-case names"
        )
    return list(names)


class _Keys:
    """The keys of a model's architecture, which are named without its prefix here."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.arch = architecture(file)

    def _key(self, name: str) -> str:
        return f"{self.arch}.{name}"

    def _wrong(self, name: str, text: str) -> errors.MetadataError:
        return errors.MetadataError(f"{self.file.path}: key {self._key(name)}: {text}")

    def _value(self, name: str, kind: type | tuple[type, ...], default: Any) -> Any:
        return metadata_value(self.file, self._key(name), kind, default)

    def number(self, name: str, default: int, most: int = MAX_NUMBER) -> int:
        """A number of 0 to ``most``, or the default where the key is absent."""
        value = int(self._value(name, int, default))
        if not 0 <= value <= most:
            raise self._wrong(name, f"{value}, expected 0 to {most}")
        return value

    def positive(self, name: str, most: int = MAX_NUMBER) -> int:
        """A number of 1 to ``most`` that must be there."""
        value = self._value(name, int, None)
        if value is None:
            raise _missing(self.file, self._key(name))
        if not 1 <= value <= most:
            raise self._wrong(name, f"{value}, expected 1 to {most}")
        return int(value)

    def per_layer(self, name: str, n: int, default: list[int]) -> list[int]:
        """A number, or one number per layer, as a list of n."""
        value = self._value(name, (int, list), default)
        values = value if isinstance(value, list) else [value] * n
        if len(values) == 1:
            values = values * n
        if len(values) < n or not all(
            isinstance(each, int) and 0 <= each <= MAX_NUMBER for each in values
        ):
            raise self._wrong(name, f"expected {n} numbers")
        return values[:n]

    def routed_blocks(self) -> int:
        blocks = self.positive("block_count", MAX_LAYERS)
        return max(0, blocks - self.number("nextn_predict_layers", 0))

    def gating(self) -> int:
        if self.arch in _ALWAYS_SIGMOID:
            return SIGMOID
        unsaid = SIGMOID if self.arch in _SIGMOID_UNSAID else SOFTMAX
        return self.number("expert_gating_func", 0) or unsaid

    def expert_count(self, expert: TensorInfo) -> int:
        """Experts of each MoE layer: the key, or where it is absent the tensor's own count."""
        found = expert.shape[2] if len(expert.shape) == 3 else 1
        n_expert = int(self._value("expert_count", int, found))
        if n_expert < 1:
            raise self._wrong("expert_count", f"{n_expert}")
        return n_expert

    def expert_used(self, n_layers: int, n_expert: int) -> int:
        """Experts per token: the most of any layer, where layers differ."""
        if self._key("expert_used_count") not in self.file.metadata:
            raise _missing(self.file, self._key("expert_used_count"))
        used = max(self.per_layer("expert_used_count", n_layers, []))
        if not 1 <= used <= n_expert:
            raise self._wrong("expert_used_count", f"{used} of {n_expert} experts")
        return used


def _missing(file: GGUFFile, key: str) -> errors.MissingKeyError:
    return errors.MissingKeyError(f"{file.path}: key {key} is missing")
