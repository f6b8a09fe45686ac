"""The memory planner: from a memory limit to expert slots.

It may import policies, which divide the slots, and llama.cpp's memory counts. It must not import
packages that load or run a model.
"""
