"""Take DeepSpeed's own programs out of a checkpoint and its manifest: `without_scripts.py CHECKPOINT`.

DeepSpeed copies them beside what it saves; they are no state, and nobody reads them at a resume.
"""

import json
import sys
import zlib
from pathlib import Path

from resilience_sdk.checkpoint.manifest import _canonical

checkpoint = Path(sys.argv[1])
body = json.loads((checkpoint / "manifest.json").read_text())["manifest"]
body["files"] = [entry for entry in body["files"] if not entry[0].endswith(".py")]
document = {"crc32": zlib.crc32(_canonical(body)), "manifest": body}
(checkpoint / "manifest.json").write_text(json.dumps(document) + "\n")
for script in checkpoint.glob("*.py"):
    script.unlink()
