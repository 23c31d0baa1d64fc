"""`python -m resilience_sdk.launcher` is `resilience run`."""

import sys

from resilience_sdk.core.console import drop_unwritten, open_closed_streams
from resilience_sdk.launcher.main import main

if __name__ == "__main__":
    open_closed_streams()
    try:
        sys.exit(main(sys.argv[1:]))
    finally:
        drop_unwritten()
