"""Changing a network around its norms without changing what it computes."""
