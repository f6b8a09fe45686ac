"""The studies: tables and figures of the papers, and ours, measured on any model."""
