"""A sparse test model with real language, made of a small dense model that is published on PyPI."""
