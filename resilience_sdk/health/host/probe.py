"""The probes of the machine itself; each runs in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator

from resilience_sdk.health.findings import Finding
from resilience_sdk.health.host import clocks, kernel_log, leftovers, limits, memory, processors
from resilience_sdk.health.job import world_size
from resilience_sdk.health.probes import Context


def host(context: Context) -> Iterator[Finding]:
    """Yield memory, limits, processors and clock: what the kernel keeps in its own tables."""
    root = context.root
    yield from memory.memory(root)
    yield from memory.oom_kills(root)
    yield from memory.shared_memory(root)
    yield from limits.open_files(root, world_size(context))
    yield from limits.file_table(root)
    yield from limits.processes(root, context.local_ranks)
    yield from limits.locked_memory(root)
    yield from processors.processors(root, context.local_ranks)
    yield from processors.load(root)
    yield from processors.stalls(root)
    yield from clocks.clock_source(root)
    yield from clocks.clock(clocks.synchronised())


def kernel(context: Context) -> Iterator[Finding]:
    """Yield what the kernel's log says."""
    yield from kernel_log.kernel_log(context.root, context.log_newer_s)


def processes(context: Context) -> Iterator[Finding]:
    """Yield what earlier jobs left behind."""
    yield from leftovers.probe(context.root, os.getuid())
