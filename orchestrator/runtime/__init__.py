"""The runtime: loads a planned model, answers requests with it, and lends it to what measures.

It may import every room but chat, serve, lab and cli.
"""
