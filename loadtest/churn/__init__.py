"""Churn: many requests of random length at once on a small pool, some cancelled, some with a deadline."""
