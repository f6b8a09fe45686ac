"""What policies compute with: how much an expert matters, which tier and slots it gets, what is
read ahead of its use.

It stands below the policies and knows none of them. What only one of them uses lies with that one.
It may import events and settings.
"""
