"""The server: llama.cpp's own, without its HTTP, behind an HTTP application of ours."""
