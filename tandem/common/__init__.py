"""Generated stubs by version."""
