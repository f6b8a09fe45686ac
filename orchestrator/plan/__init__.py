"""The memory planner: from a memory limit to expert slots.

`planning` has the pure function `plan`. `records` has its input and its result, and `footprint` the
sizes of a model's parts. `machine` measures this machine and counts llama.cpp's memory. `options`
reports options without effect. `layouts` chooses the layout of experts in slots, and `tiers_for`
the precisions of a packed file.

It may import policies, which divide the slots, and llama.cpp's memory counts. It must not import
packages that load or run a model.
"""
