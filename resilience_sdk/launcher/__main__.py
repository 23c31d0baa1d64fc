"""`python -m resilience_sdk.launcher` is `resilience run`."""

import sys

from resilience_sdk.launcher.main import main
from resilience_sdk.streams import drop_unwritten, open_closed_streams

if __name__ == "__main__":
    open_closed_streams()
    try:
        sys.exit(main(sys.argv[1:]))
    finally:
        drop_unwritten()
