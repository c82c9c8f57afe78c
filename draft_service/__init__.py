"""The draft service: sessions, proposers, server."""
