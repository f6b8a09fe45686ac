"""The command line. A command parses options, builds the configuration, and calls one function.

This package may import every other one, and no other one imports it. Only this package uses click.
"""
