"""As `test_resume_proven.py`, for the loops of frameworks: the steps are theirs, and so are the cures."""

from __future__ import annotations

import planted
import pytest
from adapter_frameworks import require

pytestmark = pytest.mark.slow

_DAILY = {
    ("accelerate", "good"),
    ("accelerate", "batch"),
    ("lightning", "good"),
    ("transformers", "good"),
    ("transformers", "scaler"),
}
_CASES = [(way, kind) for way in ("accelerate", "lightning", "transformers") for kind in planted.WAYS[way]]


@pytest.mark.parametrize(
    ("way", "kind"),
    [case if case in _DAILY else pytest.param(*case, marks=pytest.mark.release) for case in _CASES],
)
def test_a_resume_is_proven_or_what_differs_is_named(tmp_path, way, kind):
    """Killed in step 8, resumed behind step 5; the job finishes all the same."""
    require(way)
    planted.check(planted.strike(tmp_path, way, kind), kind, planted.expected(way, kind))
