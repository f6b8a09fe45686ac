"""The pinned llama.cpp release, the patches for it, and the tool that builds a wheel from both."""
