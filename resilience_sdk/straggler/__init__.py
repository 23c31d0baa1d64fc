"""Timed sections, guarded by learned deadlines and compared across ranks."""

from resilience_sdk.straggler.sections import iterate, section

__all__ = ["iterate", "section"]
