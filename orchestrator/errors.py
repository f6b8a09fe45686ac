"""Every error that a user can cause or meet, derived from one base class, MoeEdgeError.

The command line prints a MoeEdgeError as one sentence. Any other exception is a bug and keeps its
traceback. docs/python.md lists what a caller can do about each of these classes.
"""

from gguf_tools.errors import GGUFError as GGUFError
from gguf_tools.errors import HubError as HubError
from gguf_tools.errors import HubUnreachableError as HubUnreachableError
from gguf_tools.errors import MoeEdgeError as MoeEdgeError
from gguf_tools.errors import SeveralModelsError as SeveralModelsError


def sentence_of(error: Exception) -> str:
    """Return the message to show for an error that stopped a step of a model.

    For a MoeEdgeError, it is the error's own message. Any other exception came from a policy, so
    the message says that the policy failed.
    """
    if isinstance(error, MoeEdgeError):
        return str(error)
    return f"the policy failed: {type(error).__name__}: {error}"


class ConfigError(MoeEdgeError):
    """Raised for a setting that is unknown, out of range, or in conflict with another setting."""


class SettingError(ConfigError):
    """Raised for a setting with an invalid value.

    name: the setting. complaint: the end of the message, after the setting's name.
    """

    def __init__(self, name: str, complaint: str) -> None:
        super().__init__(f"the setting '{name}' {complaint}")
        self.name = name
        self.complaint = complaint


class NativeError(MoeEdgeError):
    """Raised if the native library is missing, has another version, or fails while running."""


class BudgetError(MoeEdgeError):
    """Raised for a memory budget that is too small.

    needed_bytes: the smallest budget that works; 0 if unknown.
    """

    def __init__(self, message: str, needed_bytes: int = 0) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes


class PolicyError(MoeEdgeError):
    """Raised for an unknown policy or tier, or a policy that cannot work with the model's tiers."""


class TiersError(PolicyError):
    """Raised if a policy needs more precisions (tiers) than are in use.

    The message consists of `problem`, which names the defect, and `remedy`, which names options
    that mend it. The attribute `problem` has the first part alone, for commands that lack these
    options.
    """

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}: {remedy}")
        self.problem = problem


class LossTableError(ConfigError):
    """Raised if a loss table, a file made by `moe-edge calibrate`, cannot be used.

    The message consists of `problem`, which names the defect, and `remedy`, which tells the user
    how to mend it. The attribute `problem` has the first part alone.
    """

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}: {remedy}")
        self.problem = problem


class NoLossTableError(ConfigError):
    """Raised if the user limits the quality loss, but the model has no usable loss table.

    `moe-edge calibrate` makes this table.
    """


class ProfileError(MoeEdgeError):
    """Raised for a profile of expert usage that is damaged or belongs to another model."""


class TraceError(MoeEdgeError):
    """Raised for a recorded trace that cannot be read, or does not suit the intended purpose."""


class ResourceError(MoeEdgeError):
    """Raised if the operating system refuses a resource: a thread, a file or disk space."""


class ClosedError(MoeEdgeError):
    """Raised if a model is used after it was closed, or in a forked child process."""
