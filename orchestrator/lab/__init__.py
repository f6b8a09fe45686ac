"""Benchmarks, quality evaluation, checks and studies.

The runtime, the server and the command line import nothing from this package at start. The command
line looks up an experiment by name in `orchestrator.lab.registry`, which imports its module then.
"""
