from __future__ import annotations

import enum
import io
from collections import Counter, OrderedDict, deque, namedtuple

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from resilience_sdk.checkpoint import containers
from resilience_sdk.checkpoint.state import StateMap, classify
from resilience_sdk.errors import CheckpointError, ConfigError

Transition = namedtuple("Transition", ("state", "action"))
LEAVES = some.none() | some.booleans() | some.integers() | some.floats(allow_nan=False) | some.text() | some.binary()
VALUES = some.recursive(
    LEAVES,
    lambda inner: (
        some.lists(inner, max_size=3)
        | some.dictionaries(some.text(), inner, max_size=3)
        | some.lists(inner, max_size=3).map(tuple)
        | some.lists(inner, max_size=3).map(deque)
    ),
    max_leaves=8,
)


def through_a_file(item):
    """Return what the container is packed to, written and read as a checkpoint does."""
    file = io.BytesIO()
    torch.save(containers.pack(item, "item"), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def again(item):
    """Return a new container with the content of this one."""
    new = deque(maxlen=item.maxlen) if isinstance(item, deque) else numpy.empty_like(item)
    containers.restore(new, through_a_file(item))
    return new


@given(some.lists(VALUES, max_size=4), some.none() | some.integers(4, 6))
def test_a_deque_is_what_it_was(items, maxlen):
    """Of plain values, however they are nested, with their kinds."""
    item = deque(items, maxlen)
    found = again(item)
    assert found == item
    assert repr(found) == repr(item)


def test_what_a_replay_memory_holds():
    """Arrays, tensors, scalars and named tuples come back with their kinds; what is held twice is one object again."""
    state, graph = numpy.arange(3, dtype=numpy.float32), torch.ones(2, requires_grad=True)
    items = [
        Transition(state, numpy.int64(3)),
        Transition(state, numpy.float32(0.1)),
        (torch.arange(4).reshape(2, 2), torch.tensor(1.5, dtype=torch.bfloat16), torch.empty(0, 3), graph),
        [numpy.zeros((0, 2)), numpy.array("2020-01-01", dtype="datetime64[D]"), numpy.array([(1, 2.0)], dtype="i4,f8")],
        OrderedDict(a=Counter("aab")),
        frozenset({1}),
    ]
    found = again(deque(items))
    assert [type(one) for one in found] == [type(one) for one in items]
    assert found[0].state is found[1].state
    assert found[0].state.dtype == numpy.float32
    assert found[0].state.tolist() == [0.0, 1.0, 2.0]
    assert (type(found[0].action), type(found[1].action)) == (numpy.int64, numpy.float32)
    matrix, scalar, empty, leaf = found[2]
    assert torch.equal(matrix, items[2][0])
    assert (scalar.dtype, scalar.item(), empty.shape) == (torch.bfloat16, 1.5, (0, 3))
    assert leaf.requires_grad
    assert found[3][0].shape == (0, 2)
    assert found[3][1] == items[3][1]
    assert found[3][2].dtype == items[3][2].dtype
    assert found[3][2].tolist() == [(1, 2.0)]
    assert found[4] == items[4]
    found[0].state[0] = 9.0  # they may be written to


def test_what_could_not_be_loaded_is_named():
    """With its place, before anything is written."""

    class Odd(enum.IntEnum):
        ONE = 1

    for value in (object(), Odd.ONE, numpy.array([object()])):
        with pytest.raises(CheckpointError, match=r"memory\[1\]\[0\]"):
            StateMap({"memory": deque([0, [value]])}).check()


def test_an_array_keeps_its_place_and_kind():
    """It is filled in place; another shape or dtype is an error, and so is another kind of container."""
    saved = through_a_file(numpy.arange(6).reshape(2, 3))
    with pytest.raises(ValueError, match="shape"):
        containers.restore(numpy.zeros(6, dtype=int), saved)
    with pytest.raises(ValueError, match="float64"):
        containers.restore(numpy.zeros((2, 3)), saved)
    with pytest.raises(ValueError, match="deque"):
        containers.restore(deque(), saved)


def test_what_is_saved_and_what_is_refused():
    """Containers that may be written to are each rank's own; others are refused with the cure, and no loader."""
    assert classify("a", deque([1])) == "rank"
    assert classify("a", numpy.zeros(3)) == "rank"
    assert classify("a", range(3)) == "counted"
    fixed = numpy.zeros(3)
    fixed.flags.writeable = False
    for item in (fixed, numpy.array([object()]), numpy.ma.zeros(3), bytearray(b"a"), frozenset({1})):
        with pytest.raises(ConfigError, match=r"state\['a'\]"):
            classify("a", item)
