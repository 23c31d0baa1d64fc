"""The generators that a data loader draws from, and all of a process, as JSON."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from resilience_sdk.checkpoint.generators_below import generators_below, is_generator

_OF_BATCHES = ("dataset", "collate_fn")
"""What is drawn from with each batch, so that a resume sets its generators as they were at the save."""


def parts(loader: Any) -> list[tuple[str, Any]]:
    """Return the loader and what it draws its order from, each once, under names that stay the same."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    named = [
        ("loader", loader),
        ("sampler", getattr(loader, "sampler", None)),
        ("batch_sampler", batch_sampler),
        ("inner_sampler", getattr(batch_sampler, "sampler", None)),
        ("dataset", getattr(loader, "dataset", None)),
    ]
    seen: set[int] = set()
    found = []
    for name, part in named:
        if part is not None and id(part) not in seen:
            seen.add(id(part))
            found.append((name, part))
    return found


def find_generators(loader: Any) -> dict[str, Any]:
    """Return the generators of its own that a loader draws from, by names that stay the same.

    Those of torch, Python and numpy that it and its samplers hold as attributes, and those that its data set and its
    collate function hold somewhere below, such as in a step of a transform.
    """
    found: dict[str, Any] = {}
    for name, part in [*parts(loader), ("collate_fn", getattr(loader, "collate_fn", None))]:
        held = {name: getattr(part, "generator", None)}
        held |= {f"{name}.{attribute}": value for attribute, value in getattr(part, "__dict__", {}).items()}
        for place, generator in held.items():
            is_new = all(generator is not other for other in found.values())
            if is_new and is_generator(generator):
                found[place] = generator
    for name in _OF_BATCHES:
        for place, generator in generators_below(getattr(loader, name, None), name):
            if all(generator is not other for other in found.values()):
                found[place] = generator
    return found


def restore_of_data(generators: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Set those that each batch is drawn with; orders are drawn again from the beginning."""
    from resilience_sdk.checkpoint.state import restore_generators  # imports torch

    names = [name for name in generators if name.partition(".")[0] in _OF_BATCHES]
    restore_generators({name: generators[name] for name in names}, saved)


def capture_one(generator: Any) -> Any:
    """Return the state of a generator of Python or numpy as a JSON value."""
    if isinstance(generator, random.Random):
        version, words, gauss = generator.getstate()
        return {"python": [version, list(words), gauss]}
    state = generator.get_state(legacy=False) if hasattr(generator, "get_state") else generator.bit_generator.state
    return {"numpy": _plain(state)}


def restore_one(generator: Any, saved: Mapping[str, Any]) -> None:
    """Set a generator of Python or numpy to a state of `capture_one`, if it is of the same kind."""
    if isinstance(generator, random.Random):
        if "python" in saved:
            version, words, gauss = saved["python"]
            generator.setstate((version, tuple(words), gauss))
    elif "numpy" in saved:
        state = _with_arrays(saved["numpy"])
        own = generator.get_state(legacy=False) if hasattr(generator, "get_state") else generator.bit_generator.state
        if own["bit_generator"] != state["bit_generator"]:
            return
        if hasattr(generator, "set_state"):
            generator.set_state(state)
        else:
            generator.bit_generator.state = state


def _plain(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _plain(value) for name, value in state.items()}
    if hasattr(state, "dtype") and getattr(state, "shape", ()) != ():
        return {"array": [int(value) for value in state], "of": state.dtype.str}
    return state.item() if hasattr(state, "item") else state


def _with_arrays(state: Any) -> Any:
    if not isinstance(state, dict):
        return state
    if state.keys() == {"array", "of"}:
        import numpy

        return numpy.array(state["array"], dtype=state["of"])
    return {name: _with_arrays(value) for name, value in state.items()}


def take_rng(generators: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of the generators of this process, and of these, as a JSON value."""
    from resilience_sdk.checkpoint.state import capture_generators, capture_rng  # imports torch

    return {"process": capture_rng(), "generators": capture_generators(generators)}


def set_rng(generators: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Set them as they were at `take_rng`."""
    from resilience_sdk.checkpoint.state import restore_generators, restore_rng

    restore_rng(saved["process"])
    restore_generators(generators, saved["generators"])
