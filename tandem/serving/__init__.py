"""One server life for all three services."""
