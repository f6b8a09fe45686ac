"""A hardware model of a GPU and a CXL memory that computes (the near-data paper, section 5)."""
