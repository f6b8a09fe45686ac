"""The command line: each command parses, builds the configuration, and calls one function.

It may import every room. Nothing imports it, and nothing else knows click.
"""
