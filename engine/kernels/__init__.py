"""Compiled kernels, each beside its reference."""
