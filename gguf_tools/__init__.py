"""Model files on disk: read, write, quantize and convert GGUF files, packed ones included."""
