"""One proposer per file, and their registry."""
