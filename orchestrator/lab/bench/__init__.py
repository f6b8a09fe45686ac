"""Benchmarks under memory caps: moe-edge, upstream llama.cpp and a theoretical bound."""
