"""What the node, its devices and its surroundings can do right now: probes, their findings, and the preflight.

    from resilience_sdk import health

A *probe* looks at one part of the world in a process of its own, because a driver or a mount may hang for ever;
what it saw are *findings*, each with its evidence and its cure.
"""
