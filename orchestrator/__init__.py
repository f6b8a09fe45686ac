"""Runs Mixture-of-Experts models whose experts live on disk in several precisions."""
