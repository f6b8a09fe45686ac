"""`moe-edge check`: tests whether a model runs correctly on this machine.

It describes the file, compares the logits with llama.cpp's bit by bit, and verifies that each run
stays within its planned memory.
"""

from orchestrator.lab.check.checking import CheckOptions, examine
from orchestrator.lab.check.report import render

__all__ = ["CheckOptions", "examine", "render"]
