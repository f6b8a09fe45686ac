"""Files kept between runs: their location, atomic writing, and deletion.

It may import the configuration. It must not import memory plans.
"""
