"""Starting a monitor from a script that does as it likes with its children."""

from __future__ import annotations

import os

from resilience_sdk.monitor import spawn


def test_a_script_that_collects_every_child_does_not_make_the_start_fail(tmp_path, monkeypatch):
    """With SIGCHLD ignored, or a `wait()` for anybody, the status is gone; whether a monitor runs shows elsewhere."""
    monkeypatch.setattr(os, "posix_spawn", lambda *_args, **_options: os.getppid())  # no child of ours
    spawn._spawn(tmp_path)
