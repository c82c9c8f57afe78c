"""The orchestrator: rounds, sequences, streaming to applications."""
