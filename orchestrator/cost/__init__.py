"""Predicted speed and quality loss of plans, the measurements for them, and the choice of a plan.

It may import memory plans. It must not import packages that load a model.
"""
