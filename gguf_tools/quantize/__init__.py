"""How weights become blocks of ggml's types: the library, methods, importance, GPTQ."""
