"""Importing an adapter imports no framework, not even torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ADAPTERS = sorted(
    path.stem
    for path in (ROOT / "adapters").iterdir()
    if not path.stem.startswith("_") and (path.suffix == ".py" or (path / "__init__.py").exists())
)
FRAMEWORKS = ("torch", "numpy", "lightning", "pytorch_lightning", "accelerate", "transformers", "megatron")


def test_there_are_adapters():
    """The list below is not empty by mistake."""
    assert "pytorch" in ADAPTERS


@pytest.mark.parametrize("name", ADAPTERS)
def test_importing_an_adapter_imports_no_framework(name):
    """It is imported when it is used: whoever only asks for help waits for nothing."""
    program = (
        f"import json, sys, resilience_sdk.adapters.{name}; "
        f"print(json.dumps([each for each in {FRAMEWORKS!r} if each in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []
