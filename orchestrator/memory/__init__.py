"""What fits: from a limit of memory to slots for experts.

It may import policies, which divide the slots, and what llama.cpp says of a model; never a room
that loads or runs one.
"""
