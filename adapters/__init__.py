"""Adapters: one module per training framework, each a translation onto the core and nothing else.

In come the hooks that a framework offers; out go beats, sections, checks, saves and resumes. `_base` has what all of
them share: `AttachedLoop`, the one loop that is attached, and `Patches`, which are put on a framework's objects and
taken off again.
"""

if __name__ != "resilience_sdk.adapters":
    # A second copy of these modules under another name would hold a second copy of every class.
    raise ImportError(f"import this package as 'resilience_sdk.adapters', not as {__name__!r}")
