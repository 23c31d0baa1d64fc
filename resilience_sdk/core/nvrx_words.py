"""The lines of NVRx and torchrun that its users search their logs for, as those print them: they stand beside ours."""

from __future__ import annotations


def no_heartbeat(waited_s: float, *, is_first: bool) -> str:
    """Return what NVRx's monitor logs of a rank that hangs."""
    return f"Did not get {'initial' if is_first else 'subsequent'} heartbeat. Waited {waited_s:.2f} seconds."


def closing(pid: int, signal_name: str) -> str:
    """Return what torchrun logs of a rank that it ends."""
    return f"Sending process {pid} closing signal {signal_name}"


def death(signal_name: str) -> str:
    """Return what torchrun logs of a signal that asks it to leave."""
    return f"Received Signals.{signal_name} death signal, shutting down workers"
