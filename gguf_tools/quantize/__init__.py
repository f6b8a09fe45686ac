"""Quantize weights to ggml's types: round to nearest, importance matrices, GPTQ."""
