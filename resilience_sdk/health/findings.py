"""What a probe saw: one finding for each thing that it looked at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

import attrs


class Status(str, Enum):
    """How a thing is. The order is the order of severity."""

    OK = "ok"
    UNAVAILABLE = "unavailable"  # could not be looked at, which is no fault: no GPU, no permission, not installed
    DEGRADED = "degraded"  # works, and will be slower, shorter or riskier than it should
    FAILED = "failed"  # a job that needs it will not run, or will die


_SEVERITY = {status: place for place, status in enumerate(Status)}


@attrs.frozen(kw_only=True)
class Finding:
    """What was seen of one thing.

    `probe` is the probe's name, `check` what was looked at in the terms of the field (`ecc_uncorrected`), `subject` the
    one thing among many (`GPU 3`, `/dev/shm`, `mlx5_0 port 1`), empty where there is only one. `value` and
    `threshold` are in `unit`; both are None where there is nothing to measure. `cure` is empty when nothing is wrong.
    A finding that `must` be good stops a preflight when it is `failed`. `data` holds what compares nodes or times:
    plain JSON values; `cause` is the fault's name in the taxonomy, `works` tells of a link whether it is up (and `lost`
    what to do where it was before), and `growth` (`per_minute`, `cure`) makes `value`
    a counter of which only the growth between two looks may be wrong (see `changes`).
    """

    probe: str
    check: str
    status: Status = attrs.field(converter=Status)
    subject: str = ""
    value: float | int | str | None = None
    unit: str = ""
    threshold: float | int | str | None = None
    evidence: str = ""
    cure: str = ""
    must: bool = False
    data: Mapping[str, Any] = attrs.field(factory=dict)

    @property
    def stops(self) -> bool:
        """Tell whether a job should not be started on this."""
        return self.must and self.status is Status.FAILED

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object with every key, from which `finding_from_json` makes an equal value."""
        return {**attrs.asdict(self, recurse=False), "status": self.status.value, "data": dict(self.data)}


_NAMES = frozenset(field.name for field in attrs.fields(Finding))


def finding_from_json(data: Any) -> Finding:
    """Return the finding that `Finding.to_json` described; raise ValueError for anything else."""
    if not isinstance(data, Mapping) or not {"probe", "check", "status"} <= set(data) <= _NAMES:
        raise ValueError("expected the JSON object of a finding")
    return Finding(**data)


def severity(status: Status) -> int:
    """Return the place of a status in the order of severity; ok is 0."""
    return _SEVERITY[status]


def worst(findings: Iterable[Finding]) -> Status:
    """Return the most severe status among findings; ok when there are none."""
    return max((finding.status for finding in findings), key=_SEVERITY.__getitem__, default=Status.OK)
