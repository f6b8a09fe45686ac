"""Contact with a model in one command: what it is, whether it computes what llama.cpp computes,
and whether it keeps its promise of memory: `moe-edge check`."""

from orchestrator.lab.check.checking import CheckOptions, examine
from orchestrator.lab.check.report import render

__all__ = ["CheckOptions", "examine", "render"]
