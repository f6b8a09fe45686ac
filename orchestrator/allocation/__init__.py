"""Arithmetic shared by policies: importance of experts, choice of tiers and slots, and prefetching.

This package does not import policies; arithmetic of a single policy is in that policy's file. It
may import events and settings.
"""
