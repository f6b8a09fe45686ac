"""The command line. A command parses options, builds the configuration, and calls one function.

This package may import every other package, and no other package imports it. Only this package uses
click.
"""
