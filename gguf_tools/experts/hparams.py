"""Read and check a model's hyperparameters."""

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

# Gating functions, which turn router logits into weights, by their numbers in the metadata key
# expert_gating_func.
SOFTMAX, SIGMOID = 1, 2
# Architectures whose llama.cpp graph uses the sigmoid regardless of the metadata, and architectures
# that default to it if the key is missing. All others default to the softmax.
_ALWAYS_SIGMOID = frozenset(("llama4", "mimo2", "nemotron_h_moe"))
_DEFAULT_SIGMOID = frozenset(
    ("afmoe", "cohere2moe", "glm-dsa", "glm4moe", "glm5-next", "hy_v3", "laguna", "step35")
)


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """The hyperparameters of a Mixture-of-Experts model, as its GGUF metadata states them.

    block_count: number of all layers.
    routed_blocks: number of layers, not counting the multi-token prediction layers at the end.
    n_expert_used: experts per token. If layers differ, the maximum.
    n_head, n_head_kv: number of attention heads and of KV heads of each layer.
    is_mla: whether the model uses multi-head latent attention.
    gating: the router's gating function: SOFTMAX, SIGMOID, or another number of llama.cpp's.
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
        """Read the hyperparameters from the metadata of a model's first file.

        expert: any expert tensor of the model. If the metadata lacks the number of experts, it is
            read from the shape of this tensor.

        Raises MissingKeyError if a required key is missing, and MetadataError if a value is
        impossible.
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
    """Return the number of layers, not counting the multi-token prediction layers at the end.

    moe-edge does not manage the experts of those layers. Raises GGUFError if the metadata lacks the
    number of layers or has an impossible value.
    """
    return _Keys(file).routed_blocks()


def listed_tiers(file: GGUFFile) -> list[str]:
    """Return the names of the precisions (tiers) in a packed file's metadata, the best first.

    For a file that `moe-edge pack` has not written, the result is a list with one empty name.
    Raises GGUFError if the metadata of a packed file is invalid.
    """
    if not any(key.startswith(KEY_PREFIX) for key in file.metadata):
        return [""]
    version = metadata_value(file, KEY_FORMAT_VERSION, int, None)
    if version is None:
        raise _missing(file, KEY_FORMAT_VERSION)
    if version != FORMAT_VERSION:
        raise errors.VersionError(
            f"{file.path}: key {KEY_FORMAT_VERSION}: the file has format version {version}, but"
            f" this version of moe-edge reads {FORMAT_VERSION}"
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
            f"{file.path}: key {KEY_TIERS}: {names!r:.200}, expected 1 to {MAX_TIERS} different"
            " lower-case names"
        )
    return list(names)


class _Keys:
    """Reads metadata values of a model's architecture, and checks that they are in range.

    The methods get the part of a metadata key after the architecture's name. For example,
    "block_count" stands for `llama.block_count` in a model of the architecture llama. A value out
    of range raises MetadataError.
    """

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
        """Return the integer that is stored under a key, from 0 to `most`.

        default: the result if the key is missing.
        """
        value = int(self._value(name, int, default))
        if not 0 <= value <= most:
            raise self._wrong(name, f"the value is {value}, expected 0 to {most}")
        return value

    def positive(self, name: str, most: int = MAX_NUMBER) -> int:
        """Return the integer that is stored under a key, from 1 to `most`.

        Raises MissingKeyError if the key is missing.
        """
        value = self._value(name, int, None)
        if value is None:
            raise _missing(self.file, self._key(name))
        if not 1 <= value <= most:
            raise self._wrong(name, f"the value is {value}, expected 1 to {most}")
        return int(value)

    def per_layer(self, name: str, n: int, default: list[int]) -> list[int]:
        """Return the integers that are stored under a key for the first n layers.

        The file has a list, or one number for all layers. If the key is missing, use the default.
        """
        value = self._value(name, (int, list), default)
        values = value if isinstance(value, list) else [value] * n
        if len(values) == 1:
            values = values * n
        if len(values) < n or not all(
            isinstance(each, int) and 0 <= each <= MAX_NUMBER for each in values
        ):
            raise self._wrong(
                name, f"the list is too short or has invalid numbers, expected {n} numbers"
            )
        return values[:n]

    def routed_blocks(self) -> int:
        blocks = self.positive("block_count", MAX_LAYERS)
        return max(0, blocks - self.number("nextn_predict_layers", 0))

    def gating(self) -> int:
        if self.arch in _ALWAYS_SIGMOID:
            return SIGMOID
        default = SIGMOID if self.arch in _DEFAULT_SIGMOID else SOFTMAX
        return self.number("expert_gating_func", 0) or default

    def expert_count(self, expert: TensorInfo) -> int:
        """Return the number of experts in each MoE layer.

        expert: an expert tensor. Its last dimension is used if the metadata lacks the number.
        """
        found = expert.shape[2] if len(expert.shape) == 3 else 1
        n_expert = int(self._value("expert_count", int, found))
        if n_expert < 1:
            raise self._wrong("expert_count", f"the value is {n_expert}, expected 1 or more")
        return n_expert

    def expert_used(self, n_layers: int, n_expert: int) -> int:
        """Return the number of experts that a token uses in a layer.

        If layers differ, return the maximum. Raises MissingKeyError if the file's metadata lacks
        this number. Raises MetadataError if the maximum is not from 1 to n_expert.

        n_layers: number of layers.
        n_expert: number of experts in each layer.
        """
        if self._key("expert_used_count") not in self.file.metadata:
            raise _missing(self.file, self._key("expert_used_count"))
        used = max(self.per_layer("expert_used_count", n_layers, []))
        if not 1 <= used <= n_expert:
            raise self._wrong(
                "expert_used_count", f"the value is {used}, expected 1 to {n_expert} experts"
            )
        return used


def _missing(file: GGUFFile, key: str) -> errors.MissingKeyError:
    return errors.MissingKeyError(f"{file.path}: key {key} is missing")
