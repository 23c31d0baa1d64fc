"""Adapters: one module per training framework, each a translation onto the core and nothing else."""

if __name__ != "resilience_sdk.adapters":
    # A second copy of these modules under another name would hold a second copy of every class.
    raise ImportError(f"import this package as 'resilience_sdk.adapters', not as {__name__!r}")
