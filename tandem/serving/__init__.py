"""One server life for all three services: bind, health, errors, multiplexed streams, drain."""
