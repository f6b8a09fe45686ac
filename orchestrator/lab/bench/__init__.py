"""Side-by-side measurements under memory caps, against upstream and against the bound."""
