"""The tests here share what quality is judged on."""

from judged import choices, model, text

__all__ = ["choices", "model", "text"]
