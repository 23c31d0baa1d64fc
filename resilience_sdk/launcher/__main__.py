"""`python -m resilience_sdk.launcher` is `resilience run`."""

import sys

from resilience_sdk.launcher.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
