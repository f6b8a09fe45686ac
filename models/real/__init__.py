"""A sparse test model with real language, made from a small dense model on PyPI."""
