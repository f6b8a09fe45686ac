"""Calibration: importance matrices and loss tables from the activations of a model that reads a
text.
"""
