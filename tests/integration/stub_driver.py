"""A machine with NVIDIA GPUs that are not there: the real binding loads a library whose answers stand in a file."""

import os
import shutil
import subprocess
from pathlib import Path

import needed

SOURCE = Path(__file__).parent / "nvml_stub" / "nvml.c"


class StubDriver:
    """The stub library and its state; `changed` takes effect at the next call of any process."""

    def __init__(self, library: Path, state: Path) -> None:
        self.environment = {"LD_LIBRARY_PATH": str(library.parent), "NVML_STUB_STATE": str(state)}
        self._state = state
        self._values: dict[str, str] = {}

    def changed(self, values: dict[str, object]) -> "StubDriver":
        """Change some of the answers; None takes one back."""
        self._values.update({key: str(value) for key, value in values.items()})
        lines = [f"{key} {value}\n" for key, value in self._values.items() if value != "None"]
        fresh = self._state.with_suffix(".new")
        fresh.write_text("".join(lines))
        os.replace(fresh, self._state)  # whole: another process may be reading it
        return self


def build_stub(folder: Path) -> Path:
    """Compile the stub library into `folder` and return it; skip or fail the test without a C compiler."""
    compiler = shutil.which("cc") or needed.program("gcc", "gcc libc6-dev")
    library = folder / "libnvidia-ml.so.1"
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o", str(library), str(SOURCE)]
    subprocess.run(command, check=True, timeout=60)
    return library
