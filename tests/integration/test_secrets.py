"""A job that fails and says its secrets as it does: none of them is kept, shown or sent."""

from __future__ import annotations

import json
import secrets
import string
import subprocess
import sys
from pathlib import Path

import pytest
from harness import PROJECT, job
from receiver import receiving

PLACES = (
    *("user", "signature", "bearer", "late", "token", "said", "service"),  # the exception of attempt 0
    "argument",
    "header",  # of a thread of attempt 1
    *("printed", "query"),  # in what attempt 2 writes before it ends
    *("beat", "section", "thread"),  # names that attempt 3 gives
    "reason",  # why somebody stops it
)
# `${...}` and quotes would be cut by what reads them; these are what services hand out.
LETTERS = string.ascii_letters + string.digits + "-_.~"
SHOWN = (("why",), ("why", "--json"), ("status",), ("outcome", "--json"))


def command(*words: object) -> str:
    """Return what one of our commands prints, by a process that does not know the secret variable."""
    done = subprocess.run(
        [sys.executable, "-m", "resilience_sdk", *map(str, words)],
        capture_output=True,
        text=True,
        cwd=PROJECT,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.mark.slow
def test_a_job_that_says_its_secrets_keeps_none(tmp_path: Path) -> None:
    """Fifteen places: exceptions, headers, addresses, variables, thread, log, command line, names, a stop's reason.

    Only torch's own error file, written by `@record`, has what was said; each text is otherwise as it was.
    """
    planted = {place: "k" + "".join(secrets.choice(LETTERS) for _ in range(23)) + "x" for place in PLACES}
    (tmp_path / "planted").write_text(json.dumps(planted))
    env = {"PLANTED": str(tmp_path / "planted"), "SERVICE_SECRET": planted["service"]}
    script = ("talkative.py", "--api-key", planted["argument"])
    with receiving() as receiver:
        sink = (
            "--webhook-url",
            receiver.url,
            "--webhook-events",
            "incident,decision,degraded,preempt_notice,attempt_end",
        )
        with job(tmp_path, "--max-restarts", "3", *sink, *script, env=env) as run:
            run.wait_event("first_beat", attempt=3)
            shown = command("preempt", run.run_dir, "--reason", f"token={planted['reason']} has expired")
            assert run.finish() == 75, run.screen
            sent = [
                request.body.decode()
                for request in receiver.wait_for(lambda taken: [1 for each in taken if b"has expired" in each.body])
            ]
    shown += "".join(command(name, run.run_dir, *options) for name, *options in SHOWN)
    files = [path for path in run.run_dir.rglob("*") if path.is_file()]
    kept = {path: path.read_text(errors="replace") for path in files if path.name != "error.json"}
    said = "".join(planted.values())
    assert len(said) == 25 * len(PLACES) == 25 * 15
    for place, secret in planted.items():
        assert [str(path) for path, text in kept.items() if secret in text] == [], place
        assert secret not in shown, place
        assert not [body for body in sent if secret in body], place
    told = "".join(kept.values())
    for around in (
        "[redacted] and [redacted] were refused; token=[redacted], 'Password': '[redacted]'",
        "GET https://me:[redacted]@host.example/data?part=1&sig=[redacted] failed",
        "{'Authorization': 'Bearer [redacted]', 'Accept': '*/*'}",
        "X-Api-Key: [redacted] was refused",
        "HF_TOKEN=[redacted] was refused at /x?access_token=[redacted]",
        "token=[redacted] has expired",
        "--api-key '[redacted]'",
        "part of token=[redacted]",
    ):
        assert around in told, around
    assert "token=[redacted] has expired" in "".join(sent)
