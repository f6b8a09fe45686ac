"""Every error that a user can cause or meet, derived from one base class, MoeEdgeError.

The command line prints a MoeEdgeError as one sentence. Any other exception is a bug and keeps its
traceback. docs/python.md lists what a caller can do about each of these classes.
"""

from gguf_tools.errors import GGUFError as GGUFError
from gguf_tools.errors import HubError as HubError
from gguf_tools.errors import MoeEdgeError as MoeEdgeError


def sentence_of(error: Exception) -> str:
    """Return why a step failed.

    It is the message of a MoeEdgeError, or the exception that a policy raised.
    """
    if isinstance(error, MoeEdgeError):
        return str(error)
    return f"the policy failed: {type(error).__name__}: {error}"


class ConfigError(MoeEdgeError):
    """A setting that is unknown, out of range, or in conflict with another setting."""


class SettingError(ConfigError):
    """A setting with an invalid value.

    name: the setting. complaint: what the value must be.
    """

    def __init__(self, name: str, complaint: str) -> None:
        super().__init__(f"the setting '{name}' {complaint}")
        self.name = name
        self.complaint = complaint


class NativeError(MoeEdgeError):
    """The native library is missing, does not match, or failed while running."""


class BudgetError(MoeEdgeError):
    """A memory budget that is too small. `needed_bytes` is the smallest budget that works."""

    def __init__(self, message: str, needed_bytes: int = 0) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes


class PolicyError(MoeEdgeError):
    """An unknown policy or tier, or a policy that cannot work with the model's tiers."""


class TiersError(PolicyError):
    """A policy needs more precisions than are in use.

    problem: the sentence without the remedy, because the remedy names options of a run with a
    model.
    """

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}: {remedy}")
        self.problem = problem


class LossTableError(ConfigError):
    """A loss table that cannot be used.

    problem: the sentence without the remedy.
    """

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}: {remedy}")
        self.problem = problem


class NoLossTableError(ConfigError):
    """An allowed loss without a usable loss table, which `moe-edge calibrate` would make."""


class ProfileError(MoeEdgeError):
    """A profile of expert usage that is damaged or belongs to another model."""


class TraceError(MoeEdgeError):
    """A recorded trace that cannot be read or does not fit its purpose."""


class ResourceError(MoeEdgeError):
    """The operating system refuses a resource, such as a thread, a file descriptor or disk
    space.
    """


class ClosedError(MoeEdgeError):
    """The model is closed, or it belongs to the process from which this one was forked."""
