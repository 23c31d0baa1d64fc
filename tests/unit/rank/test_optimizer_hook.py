"""Steps of optimizers as progress: until the script beats by itself."""

from __future__ import annotations

import sys
from types import SimpleNamespace

from resilience_sdk.rank import optimizer_hook


def test_a_script_that_beats_by_itself_is_asked_no_more(monkeypatch):
    """Each of its steps then costs one look; a session that starts later, as that of a forked child, is asked again."""
    hooks, pulses = [], []
    torch = SimpleNamespace(register_optimizer_step_post_hook=hooks.append)
    monkeypatch.setitem(sys.modules, "torch.optim.optimizer", torch)
    for name in ("_is_installed", "_is_needed"):
        monkeypatch.setattr(optimizer_hook, name, False)
    answers = iter([True, False, True])

    def pulse():
        pulses.append(1)
        return next(answers)

    optimizer_hook.install(pulse)
    optimizer = object()
    for _ in range(5):
        hooks[0](optimizer, (), {})
    assert len(pulses) == 2
    optimizer_hook.install(pulse)
    hooks[0](optimizer, (), {})
    assert (len(hooks), len(pulses)) == (1, 3)
