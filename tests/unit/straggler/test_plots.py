"""Scores in the user's logger: real TensorBoard and real W&B, without a network."""

from __future__ import annotations

import importlib.abc
import struct
import sys

import needed
import pytest

from resilience_sdk.errors import ConfigError, MissingExtraError
from resilience_sdk.straggler import log_to
from resilience_sdk.straggler.callbacks import plot_to
from resilience_sdk.straggler.reports import Report

REPORTS = [
    Report(dict.fromkeys(range(3), "n0"), section_relative={"fwd": {0: 1.0, 1: low, 2: 0.9}}, last_step=step)
    for step, low in ((100, 0.8), (200, 0.4))
]
NAMES = ["stragglers/section_relative_perf/fwd/" + name for name in ("min", "median", "max")]


def test_tensorboard_has_the_curves(tmp_path):
    """Minimum, median and maximum over the steps of the reports."""
    tensorboard = needed.library("torch.utils.tensorboard", "tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = tensorboard.SummaryWriter(str(tmp_path))
    plot = plot_to(writer)
    for report in REPORTS:
        plot(report)
    writer.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    curves = {name: [(e.step, round(e.value, 2)) for e in events.Scalars(name)] for name in NAMES}
    assert curves == {
        NAMES[0]: [(100, 0.8), (200, 0.4)],
        NAMES[1]: [(100, 0.9), (200, 0.9)],
        NAMES[2]: [(100, 1.0), (200, 1.0)],
    }


def records(log):
    """Yield the records of a log in LevelDB's format, which W&B keeps: blocks of 32 KiB, after a header of 7 bytes."""
    at, parts = 7, b""
    while at + 7 <= len(log):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", log, at)
        parts += log[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


@pytest.mark.slow  # starts W&B's service
def test_wandb_offline_has_the_curves_and_the_users_steps_stay_theirs(tmp_path, monkeypatch):
    """What we log joins the user's next row; the last one is there too."""
    wandb = needed.library("wandb", "wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(project="test", dir=str(tmp_path), mode="offline", settings=wandb.Settings(init_timeout=60))
    plot = plot_to("wandb")
    run.log({"loss": 3.0})
    for report in REPORTS:
        plot(report)
        run.log({"loss": 2.0})
    plot(REPORTS[0])
    run.finish()
    # The log is written in blocks of 32 KiB, the last one when the service closes it, which finish() only asks for:
    # until then a short run's log may be nothing but its header. The end of the service can be waited for.
    wandb.teardown()
    rows = []
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    for data in records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            rows.append({"/".join(i.nested_key) or i.key: i.value_json for i in record.history.item})
    assert [row.get("loss") for row in rows] in (["3", "2", "2", None], ["3.0", "2.0", "2.0", None])
    assert [row.get(NAMES[0]) for row in rows] == [None, "0.8", "0.4", "0.8"]
    assert [row.get("_step") for row in rows] == ["0", "1", "2", "3"]


def test_what_is_no_logger_is_refused():
    """With what is expected instead."""
    for wrong in (None, "tensorboard", object()):
        with pytest.raises(ConfigError, match="SummaryWriter"):
            log_to(wrong)


class _Without(importlib.abc.MetaPathFinder):
    """An environment in which a package is not installed."""

    def __init__(self, name):
        self._name = name

    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == self._name:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_without_wandb_the_cure_is_said(monkeypatch):
    """A missing package is a MissingExtraError that says how to get it."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "wandb"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [_Without("wandb"), *sys.meta_path])
    with pytest.raises(MissingExtraError, match="pip install wandb"):
        log_to("wandb")
