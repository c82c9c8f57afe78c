"""What the transformers backend adds to a model of that package: invariant rows, memory it accounts for."""
