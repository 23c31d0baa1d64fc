"""A script without torch that prints, waits until the file `told/go` is there, prints more, and fails in attempt 0."""

import os
import sys
import time
from pathlib import Path

attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
print(f"attempt {attempt} begins", flush=True)
go = Path(os.environ["TOLD"], "go")
while not go.exists():
    time.sleep(0.01)
for line in range(3):
    print(f"attempt {attempt} line {line}")
    print(f"attempt {attempt} error {line}", file=sys.stderr)
Path(os.environ["TOLD"], f"printed-{attempt}").touch()
if attempt == "0":
    sys.exit(3)
os.system("echo by the descriptor")  # as what the script starts does
