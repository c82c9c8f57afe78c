"""Chaos: answers are generated while replicas are killed, stopped, cut off, taken away and brought back."""
