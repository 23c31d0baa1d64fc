"""The probe of the software; runs in a process of its own and imports nothing of what it looks at."""

from __future__ import annotations

import time
from collections.abc import Iterator

from resilience_sdk import kernel_files
from resilience_sdk.health.findings import Finding
from resilience_sdk.health.probes import Context
from resilience_sdk.health.software import shared, timeouts, versions
from resilience_sdk.settings import settings_from_json


def probe(context: Context) -> Iterator[Finding]:
    """Yield settings, variables and the order of timeouts, then the versions, which read many files."""
    settings = settings_from_json(context.settings)
    has_gpus = kernel_files.below(context.root, "/proc/driver/nvidia").exists()
    yield from shared.settings(settings)
    yield from shared.variables(context.environment)
    yield from timeouts.order(settings, context.environment, has_gpus=has_gpus, now_unix=time.time())
    yield from versions.probe(has_gpus)
