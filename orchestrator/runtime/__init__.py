"""The runtime: loads a planned model, answers requests with it, and lends it to evaluators.

It may import every package except chat, serve, lab and cli.
"""
