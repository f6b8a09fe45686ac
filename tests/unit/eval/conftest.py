"""Shared fixtures of quality tests."""

from judged import choices, model, text

__all__ = ["choices", "model", "text"]
