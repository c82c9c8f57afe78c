"""Making draft models for a target: text from the target itself, training on it, measured acceptance, the artefact."""
