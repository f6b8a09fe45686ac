"""GGUF files: what is in them, read strictly, and written whole or not at all."""
