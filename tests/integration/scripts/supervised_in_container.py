"""One rank in a PID namespace of its own: `orphan` leaves an orphan behind, `wait` saves and leaves on SIGTERM."""

import os
import signal
import sys
import time
from pathlib import Path

told = Path(os.environ["TOLD"])


def leave(_number: int, _frame: object) -> None:
    """Save, as far as a test can tell."""
    (told / "heard").write_text("SIGTERM\n")
    sys.exit(75)


signal.signal(signal.SIGTERM, leave)
if sys.argv[1] == "orphan":
    reader, writer = os.pipe()
    if os.fork() == 0:
        orphan = os.fork()
        if orphan:
            os.write(writer, str(orphan).encode())
            os._exit(0)
        while os.getppid() != 1:
            time.sleep(0.01)
        os._exit(0)
    os.wait()
    orphan = int(os.read(reader, 20))
    # A zombie is still in /proc: that it is gone means that PID 1 has collected it.
    while Path(f"/proc/{orphan}").exists():
        time.sleep(0.01)
    (told / "reaped").write_text(f"{orphan} {Path('/proc/1/cmdline').read_text().count('resilience_sdk')}\n")
else:
    (told / "up").touch()
    while True:
        time.sleep(0.05)
