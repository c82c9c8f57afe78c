"""Engines behind the SpeculativeEngine protocol."""
