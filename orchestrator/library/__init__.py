"""The Python library: a loaded model with methods (`LLM`), and measurements as lists of dicts.

It may import every package but cli. `orchestrator` offers its names; docs/python.md describes them.
"""
