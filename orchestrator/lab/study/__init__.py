"""Studies of quality: the tables and figures of the papers, on one model and one text."""
