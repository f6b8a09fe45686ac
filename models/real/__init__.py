"""A sparse test model with real language, made from a small dense model that is published on
PyPI."""
