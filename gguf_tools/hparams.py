"""Checked hyperparameters of a model, out of its metadata."""

from . import errors
from .layout import FORMAT_VERSION, KEY_FORMAT_VERSION, KEY_PREFIX, KEY_TIERS, MAX_TIERS
from .reader import GGUFFile, TensorInfo, metadata_value

MAX_NUMBER = 1 << 24
MAX_LAYERS = 4096


def announced_tiers(file: GGUFFile) -> list[str]:
    """Tier names of a packed file, best first; one empty name for an ordinary file."""
    if not any(key.startswith(KEY_PREFIX) for key in file.metadata):
        return [""]
    version = metadata_value(file, KEY_FORMAT_VERSION, int, None)
    if version is None:
        raise errors.MissingKeyError(f"{file.path}: key {KEY_FORMAT_VERSION} is missing")
    if version != FORMAT_VERSION:
        raise errors.VersionError(
            f"{file.path}: key {KEY_FORMAT_VERSION}: {version}; this version reads {FORMAT_VERSION}"
        )
    names = metadata_value(file, KEY_TIERS, list, None)
    if names is None:
        raise errors.MissingKeyError(f"{file.path}: key {KEY_TIERS} is missing")
    valid = all(isinstance(name, str) and name == name.lower() and name for name in names)
    if not valid or not 1 <= len(names) <= MAX_TIERS or len(set(names)) != len(names):
        raise errors.MetadataError(
            f"{file.path}: key {KEY_TIERS}: {names!r:.200}; expected 1 to {MAX_TIERS} different"
            " lower-case names"
        )
    return list(names)


def number(file: GGUFFile, key: str, default: int, most: int = MAX_NUMBER) -> int:
    """A number of 0 to ``most``, or the default where the key is absent."""
    value = int(metadata_value(file, key, int, default))
    if not 0 <= value <= most:
        raise errors.MetadataError(f"{file.path}: key {key}: {value}, expected 0 to {most}")
    return value


def positive(file: GGUFFile, key: str, most: int = MAX_NUMBER) -> int:
    """A number of 1 to ``most`` that must be there."""
    value = metadata_value(file, key, int, None)
    if value is None:
        raise errors.MissingKeyError(f"{file.path}: key {key} is missing")
    if not 1 <= value <= most:
        raise errors.MetadataError(f"{file.path}: key {key}: {value}, expected 1 to {most}")
    return int(value)


def routed_blocks(file: GGUFFile, arch: str) -> int:
    """Layers of the model proper: those behind them predict further tokens, and are left alone."""
    blocks = positive(file, f"{arch}.block_count", MAX_LAYERS)
    return max(0, blocks - number(file, f"{arch}.nextn_predict_layers", 0))


def per_layer(file: GGUFFile, key: str, n: int, default: list[int]) -> list[int]:
    """A number, or one number per layer, as a list of n."""
    value = metadata_value(file, key, (int, list), default)
    values = value if isinstance(value, list) else [value] * n
    if len(values) == 1:
        values = values * n
    if len(values) < n or not all(
        isinstance(each, int) and 0 <= each <= MAX_NUMBER for each in values
    ):
        raise errors.MetadataError(f"{file.path}: key {key}: expected {n} numbers")
    return values[:n]


def expert_count(file: GGUFFile, arch: str, info: TensorInfo) -> int:
    """Experts of each MoE layer: the key, or where it is absent the tensor's own count."""
    found = info.shape[2] if len(info.shape) == 3 else 1
    n_expert = int(metadata_value(file, f"{arch}.expert_count", int, found))
    if n_expert < 1:
        raise errors.MetadataError(f"{file.path}: key {arch}.expert_count: {n_expert}")
    return n_expert


def expert_used(file: GGUFFile, arch: str, block_count: int, n_expert: int) -> int:
    """Experts per token: the most of any layer, where layers differ."""
    key = f"{arch}.expert_used_count"
    if key not in file.metadata:
        raise errors.MissingKeyError(f"{file.path}: key {key} is missing")
    used = max(per_layer(file, key, block_count, []))
    if not 1 <= used <= n_expert:
        raise errors.MetadataError(f"{file.path}: key {key}: {used} of {n_expert} experts")
    return used
