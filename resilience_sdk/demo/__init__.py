"""`resilience demo`: a real model on real text is hung, killed and preempted, and must not notice.

`train` is the script, and the best example of the API; `command` runs it, and says what must come true.
"""

from resilience_sdk.demo.command import main

__all__ = ["main"]
