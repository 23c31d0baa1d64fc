"""A real Prometheus that scrapes a run, with our alert rules loaded."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import needed

RULES = Path(__file__).parent.parent.parent / "resilience_sdk/telemetry/provided/alerts.yml"
_PATIENCE_S = 120.0  # the exporter is at low priority, and the machine may be busy


def prometheus_program(name: str) -> str:
    """Return where a program of Debian's package prometheus is; skip or fail the test without."""
    return needed.program(name, "prometheus")


def free_port() -> int:
    """Return a port that nobody uses just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@attrs.define
class Prometheus:
    """One that runs; everything is asked over its own API."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def get(self, path: str, **query: str) -> Any:
        """Return the data of an answer."""
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=20) as answer:
            return json.loads(answer.read())["data"]

    def values(self, query: str) -> list[float]:
        """Return the values that a query has now."""
        return [float(item["value"][1]) for item in self.get("query", query=query)["result"]]

    def rules(self) -> list[dict[str, Any]]:
        """Return the rules that it has loaded."""
        return [rule for group in self.get("rules")["groups"] for rule in group["rules"]]

    def wait_for(self, query: str, enough: Callable[[list[float]], object]) -> list[float]:
        """Wait until the values of a query are as wanted."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            values: list[float] = []
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                values = self.values(query)
            if enough(values):
                return values
            assert time.monotonic() < deadline, f"{query} is {values}: {self.log.read_text()[-2000:]}"
            time.sleep(0.1)


@contextlib.contextmanager
def scraping(folder: Path, target: str, token: str) -> Iterator[Prometheus]:
    """Scrape `target` twice a second until the end of the block."""
    config = {
        "global": {"scrape_interval": "500ms", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [
            {
                "job_name": "resilience",
                "authorization": {"credentials": token},
                "static_configs": [{"targets": [target]}],
            }
        ],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    port = free_port()
    log = folder / "prometheus.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [
                prometheus_program("prometheus"),
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=out,
            stderr=out,
        )
    try:
        yield Prometheus(f"http://127.0.0.1:{port}", process, log)
    finally:
        process.terminate()
        try:
            process.wait(20)
        finally:
            process.kill()
