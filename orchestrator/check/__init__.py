"""Contact with a model in one command: what it is, whether it computes what llama.cpp computes,
and whether it keeps its promise of memory: `moe-edge check`."""

from orchestrator.check.checking import CheckOptions, examine
from orchestrator.check.report import render

__all__ = ["CheckOptions", "examine", "render"]
