"""Bytes on disk: the expert file and ordinary GGUFs, read, written and quantized."""
