"""Helpers of this folder can be imported by all tests."""

import contextlib
import gc
import importlib
import os
import sys
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import durations

ROOT = Path(__file__).parents[1]

# Images of containers often set it, and then each of the hundreds of processes that tests start compiles the package
# anew.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    sys.dont_write_bytecode = False


@cache
def _shares(path):
    """Tell whether tests of that file have anything in common that takes time to make."""
    return not path.startswith("tests/integration/") or 'scope="module"' in (ROOT / path).read_text()


def what_stays_together(nodeid):
    """Return the name of the tests that one process is to run, one after another, with this one.

    Those of its file; of its adapter, where jobs are made for each of them; itself alone, where it shares nothing.
    """
    path, _, name = nodeid.partition("::")
    if path.endswith("adapters_contract/test_contract.py"):
        return f"{path} {name.partition('[')[2]}"
    return path if _shares(path) else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Distribute tests by `what_stays_together` in place of `--dist loadfile`, the longest first: none trails."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadScopeScheduling

    committed = durations.read(durations.COMMITTED)
    lanes = durations.lanes_of(config.getoption("markexpr"))

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return what_stays_together(nodeid)

        def _assign_work_unit(self, node):
            if not hasattr(self, "expected"):
                self.expected = durations.expected(committed, lanes, {s: list(u) for s, u in self.workqueue.items()})
            longest = max(self.workqueue, key=self.expected.__getitem__)
            self.workqueue.move_to_end(longest, last=False)
            with contextlib.suppress(OSError):  # a process that has just died: `remove_node` comes, and takes it back
                super()._assign_work_unit(node)

        def _reschedule(self, node):
            # A process runs a test only once it knows the next one or that there is none. xdist gives one that takes
            # over from a crashed one a single unit, which may be a single test: both would wait for ever.
            if node in self.registered_collections:  # else it is only beginning, and comes here when it can
                while not node.shutting_down and self._pending_of(self.assigned_work[node]) <= 2:
                    super()._reschedule(node)

        def remove_node(self, node):
            # What a crashed process has done, and the test that it crashed in, are not run again.
            workload = self.assigned_work.pop(node)
            crashed = next((name for unit in workload.values() for name, done in unit.items() if not done), None)
            if crashed is not None:
                print(f"\ncrashed: {crashed}", flush=True)
                for scope, unit in workload.items():
                    if left := {name: done for name, done in unit.items() if not done and name != crashed}:
                        self.workqueue[scope] = left
                for other in self.assigned_work:
                    self._reschedule(other)
            return crashed

    return Together(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """Print how a test process ended that should not have: a signal, or an exit code."""
    if error:
        process = getattr(node.gateway._io, "popen", None)
        print(f"\n{node.gateway.id} ended with {process.wait(10) if process else 'an unknown code'}", flush=True)


def pytest_configure(config):
    """Write how long each file takes where `TEST_DURATIONS` names a file, in the process that hears of all tests."""
    path = os.environ.get("TEST_DURATIONS")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(durations.Recorder(Path(path)), "durations")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    """Keep a failure on a page with SHORT_FAILURES: what it compares may be the screen of a job, thousands of lines."""
    report = yield
    if report.failed and os.environ.get("SHORT_FAILURES") and hasattr(report.longrepr, "reprtraceback"):
        for traceback, crash, _ in getattr(report.longrepr, "chain", [(report.longrepr.reprtraceback, None, None)]):
            for entry in traceback.reprentries:
                entry.lines[:] = _a_page(entry.lines)
            if crash is not None:
                crash.message = crash.message.strip().splitlines()[0][:300] if crash.message.strip() else ""
        report.sections[:] = [(name, "\n".join(_a_page(text.splitlines()))) for name, text in report.sections]
    return report


def _a_page(lines):
    """Return the first and the last lines of many: what was asked, and how it ended."""
    return lines if len(lines) <= 60 else [*lines[:20], f"... {len(lines) - 55} lines ...", *lines[-35:]]


def pytest_collection_finish():
    """Leave what was imported until now, with frameworks most of what there is, out of all collections of garbage."""
    # pytest's plugin of hypothesis loads it at the end at the latest, and it looks for who refers to trio's dice
    # (selenium brings trio): nobody, once they are frozen, which is a warning.
    importlib.import_module("hypothesis")
    gc.collect()
    gc.freeze()
