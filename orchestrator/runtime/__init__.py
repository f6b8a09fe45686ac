"""The engine: a planned model comes into memory, runs step by step, and answers.

It may import every room but chat, serve, lab and cli.
"""
