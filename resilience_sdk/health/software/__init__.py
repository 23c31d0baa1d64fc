"""What the ranks run on: versions, variables, timeouts, signals, and whether they are the same everywhere."""
