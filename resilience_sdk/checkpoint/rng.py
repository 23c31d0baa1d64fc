"""Random number generators of this process, as JSON: Python's, numpy's, torch's on CPU and on CUDA.

Reading a state consumes nothing. Only what is loaded is touched: numpy is left alone unless the program
imported it, CUDA unless the program started it.
"""

from __future__ import annotations

import base64
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch


def capture_rng() -> dict[str, Any]:
    """Return the states of all generators in use in this process as a JSON value."""
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "torch": _encode(torch.get_rng_state()),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
        states["numpy"] = [name, [int(key) for key in keys], int(position), int(has_gauss), float(cached)]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = [_encode(state) for state in torch.cuda.get_rng_state_all()]
        # Devices may be numbered differently next time; a rank's own one is what matters most.
        states["cuda_current"] = _encode(torch.cuda.get_rng_state())
    return states


def restore_rng(states: Mapping[str, Any]) -> None:
    """Set every generator that `capture_rng` saw and that exists here to the state that it had then."""
    if "python" in states:
        version, words, gauss = states["python"]
        random.setstate((version, tuple(words), gauss))
    if "torch" in states:
        torch.set_rng_state(decode_tensor(states["torch"]))
    if "numpy" in states:
        # Imported here if need be: the program used it at the save, so it will use it again.
        import numpy

        name, keys, position, has_gauss, cached = states["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached))
    if "cuda" in states and torch.cuda.is_available():
        if len(states["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all([decode_tensor(text) for text in states["cuda"]])
        torch.cuda.set_rng_state(decode_tensor(states["cuda_current"]))


def capture_generators(generators: Mapping[str, torch.Generator]) -> dict[str, str]:
    """Return the states of generator objects of the program's own as a JSON value."""
    return {name: _encode(generator.get_state()) for name, generator in generators.items()}


def restore_generators(generators: Mapping[str, torch.Generator], states: Mapping[str, str]) -> None:
    """Set those of `generators` that `capture_generators` saw to the state that they had then."""
    for name, generator in generators.items():
        if name in states:
            generator.set_state(decode_tensor(states[name]))


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.cpu().tolist())).decode("ascii")


def decode_tensor(text: str) -> torch.Tensor:
    """Return the byte tensor that `text` (base64) holds."""
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8).clone()
