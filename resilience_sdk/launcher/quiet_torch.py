"""Loads torch into the launcher without its chatter: what concerns the training, the ranks say themselves."""

from __future__ import annotations

import warnings

from resilience_sdk import environ

_CPP_LEVEL = "TORCH_CPP_LOG_LEVEL"
_NO_NUMPY = "Failed to initialize NumPy"  # said at each import of torch; the launcher does without


def load_torch() -> None:
    """Import torch so that its C++ part says errors only: of a lost store it prints whole stacks."""
    own = environ.environment()
    is_open = _CPP_LEVEL not in own
    if is_open:
        own[_CPP_LEVEL] = "ERROR"
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=_NO_NUMPY)
            import torch  # noqa: F401 - it reads the variable once
    finally:
        if is_open:
            del own[_CPP_LEVEL]  # what the ranks say is the user's
