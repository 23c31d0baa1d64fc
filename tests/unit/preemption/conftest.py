"""Metadata services of three clouds on the loopback interface, and a clock that the test moves."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from metadata_services import Azure, Ec2, Gce, serving


class Hands:
    """A clock whose hands the test moves."""

    def __init__(self) -> None:
        self.ns, self.unix = 0, 1_700_000_000.0

    def monotonic_ns(self) -> int:
        return self.ns

    def wall_s(self) -> float:
        return self.unix

    def pass_s(self, seconds: float) -> None:
        self.ns += int(seconds * 1e9)
        self.unix += seconds


@pytest.fixture
def clock() -> Hands:
    return Hands()


@pytest.fixture
def ec2():
    with serving(Ec2()) as service:
        yield service


@pytest.fixture
def gce():
    with serving(Gce()) as service:
        yield service


@pytest.fixture
def azure():
    with serving(Azure()) as service:
        yield service
