"""The tests here share what studies are made on."""

from judged import choices, model, text

__all__ = ["choices", "model", "text"]
