"""Read GGUF files with strict checks, and write them completely or not at all."""
