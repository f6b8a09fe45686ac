"""The terminal: a conversation on it, and how it is written.

It may import the runtime.
"""
