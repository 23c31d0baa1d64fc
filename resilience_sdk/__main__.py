"""`python -m resilience_sdk` is the `resilience` command."""

from __future__ import annotations

import sys

from resilience_sdk.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
