"""Sections: kinds, timeouts, decorators and loaders."""

from __future__ import annotations

import asyncio
import threading

import pytest

from resilience_sdk.errors import ConfigError
from resilience_sdk.straggler import iterate, section


@pytest.mark.parametrize("kind", ["compute", "comm", "io", "idle"])
def test_the_kind_is_on_the_page(recording, kind):
    """Each kind is passed on."""
    with section("part", kind=kind):
        assert recording.lane().stack[0].kind == kind


@pytest.mark.parametrize("kind", ["computation", "", None, "heartbeat"])
def test_an_unknown_kind_is_refused(recording, kind):
    """The error names the section, the value and the kinds there are."""
    with pytest.raises(ConfigError, match=r"section\('part', kind=.*compute, comm, io, idle"):
        section("part", kind=kind)


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("timeout", [0, -1.0, "5", float("nan"), True])
def test_a_bad_timeout_is_refused(recording, warm, timeout):
    """The error names the section and the value, and the section stays as it was."""
    if warm:
        with section("part", timeout=4.0):
            pass
    with pytest.raises(ConfigError, match=r"section\('part', timeout="):
        section("part", timeout=timeout)
    with section("part", timeout=4.0):
        assert recording.lane().stack[0].timeout_s == 4.0


@pytest.mark.parametrize("name", ["", 5, None, ["a"]])
def test_a_name_that_is_none_is_refused(recording, name):
    """The error names the value."""
    with pytest.raises(ConfigError, match="takes a string"):
        section(name)


def test_a_timeout_may_change(recording):
    """The newest argument counts; none means a learned one."""
    for timeout in (None, 3.0, 0.25, None, 8):
        with section("part", timeout=timeout):
            assert recording.lane().stack[0].timeout_s == timeout


def test_an_endless_timeout_is_one_that_never_passes(recording):
    """Infinity is accepted, as no deadline at all for that section."""
    with section("part", timeout=float("inf")):
        (opened,) = recording.lane().stack
    assert opened.timeout_s is None or opened.timeout_s > 1e8


def test_a_timeout_holds_in_other_threads(recording):
    """A thread that enters the section has the same timeout."""
    seen = []

    def work() -> None:
        with section("part", timeout=2.5):
            seen.append(recording.lane().stack[0].timeout_s)

    with section("part"):
        pass
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [2.5]


def test_long_and_foreign_names(recording):
    """A long name is cut, and any text is a name; the page stays readable."""
    for name in ("n" * 500, "größe/📦", "a\nb\0c", "\udcff"):
        with section(name):
            (opened,) = recording.lane().stack
        assert opened.name
        assert len(opened.name) <= 48


def test_long_names_that_begin_alike_stay_different(recording):
    """Two files of one directory, say: each has its own durations."""
    for part in ("model.pt", "optimizer.pt", "state.pt"):
        with section("save /shared/checkpoints/of/this/project/" + part):
            pass
    assert sorted(map(len, recording.harvest().values())) == [1, 1, 1]


def test_decorated_with_and_without_parentheses(recording):
    """Without parentheses the function names the section; a coroutine function stays one."""

    @section
    def load() -> list[str]:
        return recording.stack()

    @section("forward", kind="compute")
    def fwd() -> list[str]:
        return recording.stack()

    @section("fetch", kind="io")
    async def fetch() -> list[str]:
        await asyncio.sleep(0)
        return recording.stack()

    assert (load(), fwd(), asyncio.run(fetch())) == (["load"], ["forward"], ["fetch"])
    assert asyncio.iscoroutinefunction(fetch)
    assert load.__name__ == "load"


def test_generators_are_refused():
    """Decorating a generator function is an error that says what to do instead."""

    def batches():
        yield 1

    for decorate in (section, section("data")):
        with pytest.raises(TypeError, match=r"is a generator.*iterate"):
            decorate(batches)


def test_waiting_for_a_loader_is_a_section(recording):
    """Each wait is timed as `data`, the work on a batch is not in it, and the end is not an error."""

    def loader():
        for number in range(3):
            assert recording.stack() == ["data"]
            yield number

    for number in iterate(loader()):
        assert recording.stack() == []
        assert number in (0, 1, 2)
    assert len(recording.harvest()["data"]) == 4


def test_a_loader_that_fails(recording):
    """Its exception passes and the section is closed."""

    def loader():
        yield 1
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        list(iterate(loader()))
    assert recording.stack() == []
