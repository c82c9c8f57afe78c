"""Paged key-value memory: block pool and block tables."""
