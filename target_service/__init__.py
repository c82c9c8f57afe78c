"""The target service: scheduler, verifier, server."""
