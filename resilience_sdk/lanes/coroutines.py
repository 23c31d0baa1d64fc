"""Whether the caller runs inside an event loop, without importing one."""

from __future__ import annotations

import sys


def in_event_loop() -> bool:
    """Tell whether an asyncio event loop runs in this thread."""
    asyncio = sys.modules.get("asyncio")
    return asyncio is not None and asyncio._get_running_loop() is not None
