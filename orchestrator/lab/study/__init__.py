"""Studies that reproduce the papers' tables and figures, and our own, on any model."""
