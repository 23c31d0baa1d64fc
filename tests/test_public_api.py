"""The public surface: what is promised is there, once, under its own name."""

import importlib
import subprocess
import sys

import resilience_sdk


def test_every_public_name_resolves_twice_to_the_same_thing():
    """A submodule that is imported later must not replace a public function of the same name."""
    first = {name: getattr(resilience_sdk, name) for name in resilience_sdk.__all__}
    for module in ("heartbeats", "straggler.sections", "rank.run", "faults", "checkpoint", "monitor.spawn"):
        importlib.import_module(f"resilience_sdk.{module}")
    assert {name: getattr(resilience_sdk, name) for name in resilience_sdk.__all__} == first
    assert callable(resilience_sdk.heartbeat)


def test_all_is_sorted_and_equals_the_lazy_table():
    """`__all__` and the table of lazy names say the same."""
    assert {name for names in resilience_sdk._HOMES.values() for name in names} < set(resilience_sdk.__all__)
    assert resilience_sdk.__all__ == sorted(resilience_sdk.__all__)
    assert dir(resilience_sdk) == sorted(resilience_sdk.__all__)


def test_heartbeat_carries_its_verbs():
    """`heartbeat` is a function with `beat`, `paused` and `done`."""
    for verb in ("beat", "paused", "done"):
        assert callable(getattr(resilience_sdk.heartbeat, verb))


def test_an_unknown_name_is_an_attribute_error():
    """A misspelt name fails as in any module, and the package stays usable."""
    code = "import resilience_sdk\ntry:\n    resilience_sdk.hartbeat\nexcept AttributeError as e:\n    print(e)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "hartbeat" in done.stdout
