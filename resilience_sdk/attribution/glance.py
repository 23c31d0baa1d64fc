"""Whether a line may mean anything, for a small part of the cost of reading it. Pure.

Asked only where lines with a word of trouble come by the thousand and mean nothing. It may say yes in vain, never no to
a line that the reader would take for a sign, an exception, a traceback or a launcher's report.
"""

from __future__ import annotations

import re

from resilience_sdk.attribution.signatures import may_say

_MOST_LOOKED_AT = 4000
# What is read by its form and not by a sign.
_BY_FORM = re.compile(
    rb"Error|Exception|Interrupt|Exit|Iteration|Warning|Timeout|Killed|Preempted|Failure|Empty|Full|Traceback|File \""
    rb"|Root Cause|FAILED|Command|Primary job|Job step|Unable to shutdown|Sending process|Killing|SIGTERM|Xid"
)
_BY_WORD = (b"what()", b"exit", b"srun", b"mpirun", b"closing", b"^C")  # a pattern of lower case would be slow


def may_mean(raw: bytes) -> bool:
    """Tell whether to read a line."""
    raw = raw[:_MOST_LOOKED_AT]
    if _BY_FORM.search(raw) is not None or any(word in raw for word in _BY_WORD):
        return True
    return may_say(raw.decode("latin-1"))
