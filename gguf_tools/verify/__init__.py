"""Verify a model file: its layout, its metadata, its checksums and every block of its weights."""

from gguf_tools.verify.report import Problem, VerifyReport
from gguf_tools.verify.verifying import verify

__all__ = ["Problem", "VerifyReport", "verify"]
