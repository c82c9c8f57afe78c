"""Decoder-only families and their weights."""
