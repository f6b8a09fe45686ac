"""Prompts that were read before: kept in memory and on disk, so that none is read twice."""

from orchestrator.prompts.cache import PromptCache
from orchestrator.prompts.folder import PromptFolder
from orchestrator.prompts.shelf import Shelf

__all__ = ["PromptCache", "PromptFolder", "Shelf"]
