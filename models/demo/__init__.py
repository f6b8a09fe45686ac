"""The demo model: its card, its file, the text that benchmarks read, and how it was made."""
