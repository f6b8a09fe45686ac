"""Runs Mixture-of-Experts models whose experts live on disk in several precisions.

`from orchestrator import LLM` is the library; docs/python.md describes it. Its names are imported
on first use, so that the command line starts fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.errors import BudgetError as BudgetError
    from orchestrator.errors import ClosedError as ClosedError
    from orchestrator.errors import ConfigError as ConfigError
    from orchestrator.errors import GGUFError as GGUFError
    from orchestrator.errors import HubError as HubError
    from orchestrator.errors import MoeEdgeError as MoeEdgeError
    from orchestrator.errors import NativeError as NativeError
    from orchestrator.errors import PolicyError as PolicyError
    from orchestrator.errors import ResourceError as ResourceError
    from orchestrator.library.llm import LLM as LLM
    from orchestrator.library.llm import Stream as Stream
    from orchestrator.library.measure import bench as bench
    from orchestrator.library.measure import record as record
    from orchestrator.library.measure import replay as replay
    from orchestrator.library.results import ChatAnswer as ChatAnswer
    from orchestrator.library.results import Chunk as Chunk
    from orchestrator.library.results import Completion as Completion
    from orchestrator.library.results import PlanSummary as PlanSummary
    from orchestrator.library.results import Score as Score
    from orchestrator.library.results import ToolCall as ToolCall

__all__ = [
    "LLM",
    "BudgetError",
    "ChatAnswer",
    "Chunk",
    "ClosedError",
    "Completion",
    "ConfigError",
    "GGUFError",
    "HubError",
    "MoeEdgeError",
    "NativeError",
    "PlanSummary",
    "PolicyError",
    "ResourceError",
    "Score",
    "Stream",
    "ToolCall",
    "bench",
    "record",
    "replay",
]
_RESULTS = ("ChatAnswer", "Chunk", "Completion", "PlanSummary", "Score", "ToolCall")
# {public name: its module}
_PLACES = {
    **dict.fromkeys(__all__, "orchestrator.errors"),
    **dict.fromkeys(("bench", "record", "replay"), "orchestrator.library.measure"),
    **dict.fromkeys(("LLM", "Stream"), "orchestrator.library.llm"),
    **dict.fromkeys(_RESULTS, "orchestrator.library.results"),
}


if not TYPE_CHECKING:  # for a type checker, a misspelled name would be an Any

    def __getattr__(name: str) -> Any:
        """Import a public name of this package when it is first used."""
        if name not in _PLACES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = getattr(import_module(_PLACES[name]), name)
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
