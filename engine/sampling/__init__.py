"""Processors, sampler and verification policies."""
