"""What is kept on disk between runs: where it lies, how it is written, how it is deleted.

It may import the configuration; never a plan.
"""
