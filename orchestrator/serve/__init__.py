"""The HTTP server: our HTTP application in front of llama.cpp's server core."""
