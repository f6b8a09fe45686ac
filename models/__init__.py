"""Models that moe-edge ships or knows about."""
