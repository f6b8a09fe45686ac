"""Prompts that were read before: kept in memory and on disk, so that none is read twice."""

from orchestrator.engine.prompts.cache import PromptCache
from orchestrator.engine.prompts.folder import PromptFolder
from orchestrator.engine.prompts.shelf import Shelf

__all__ = ["PromptCache", "PromptFolder", "Shelf"]
