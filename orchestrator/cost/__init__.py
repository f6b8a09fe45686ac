"""What a plan takes and what it loses, measured here or foreseen, and which plan runs.

It may import plans of memory; never a room that loads a model.
"""
