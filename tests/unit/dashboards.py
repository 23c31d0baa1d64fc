"""A dashboard without a socket: the whole application, asked by a client in this process."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import needed

from resilience_sdk.dashboard.access import Hosts
from resilience_sdk.dashboard.runs import FoundRuns, RunBook

for _module in ("jinja2", "uvicorn"):
    needed.library(_module, "dashboard")
TestClient = needed.library("starlette.testclient", "dashboard").TestClient


@contextmanager
def dashboard(
    *folders: Path, token: str | None = None, hosts: Hosts | None = None, raises: bool = True
) -> Iterator[Any]:
    """Serve these folders in the block."""
    from resilience_sdk.dashboard.app import Dashboard

    app = Dashboard(RunBook(FoundRuns([str(folder) for folder in folders])), hosts=hosts, token=token)
    with TestClient(
        app, base_url="http://127.0.0.1:8484", follow_redirects=False, raise_server_exceptions=raises
    ) as client:
        yield client


def links(page: str) -> list[str]:
    """Return the addresses of the runs on a list."""
    return [html.unescape(found) for found in re.findall(r'href="(/run/[^"]*)"', page)]
