"""The demo model: model card, model file, benchmark text, and the code that trained it."""
