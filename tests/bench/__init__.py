"""Measurements beside the peers, on the same machine in the same run: `python -m tests.bench --help`."""
