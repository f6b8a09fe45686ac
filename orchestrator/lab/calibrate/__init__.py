"""Calibration: importance matrices and loss tables from a model's activations on a text."""
