"""Every error that a user can cause or meet, below one base.

The command line turns a MoeEdgeError into one sentence; anything else is a bug and
keeps its traceback.
"""

from gguf_tools.errors import GGUFError as GGUFError
from gguf_tools.errors import MoeEdgeError as MoeEdgeError


def sentence_of(error: Exception) -> str:
    """Return why a step failed: the reason of an error of ours, or what a policy raised."""
    if isinstance(error, MoeEdgeError):
        return str(error)
    return f"the policy failed: {type(error).__name__}: {error}"


class ConfigError(MoeEdgeError):
    """A setting that is unknown, out of its range or at odds with another."""


class SettingError(ConfigError):
    """One setting alone that cannot be: `name` is the one, `complaint` what it must be."""

    def __init__(self, name: str, complaint: str) -> None:
        super().__init__(f"the setting '{name}' {complaint}")
        self.name = name
        self.complaint = complaint


class NativeError(MoeEdgeError):
    """The native library is missing, does not match, or failed while running."""


class BudgetError(MoeEdgeError):
    """A memory budget that cannot work; names the smallest one that does."""

    def __init__(self, message: str, needed_bytes: int = 0) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes


class PolicyError(MoeEdgeError):
    """An unknown policy or tier, or a policy that the model's tiers cannot serve."""


class TiersError(PolicyError):
    """A policy needs more precisions than are in use. problem: the sentence without the remedy,
    which names options of a run with a model."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}: {remedy}")
        self.problem = problem


class ProfileError(MoeEdgeError):
    """A profile of expert use that is damaged, or of another model."""


class TraceError(MoeEdgeError):
    """A recorded trace cannot be read, or does not serve what it is asked for."""
