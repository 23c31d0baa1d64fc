"""`megatron.training` on CPU, for tests alone: `cpu_megatron`, and what the loop of Megatron-LM asks for besides.

Only Megatron is told that there is a device: torch and the SDK know better. Without triton its kernels are never
called, only imported; without Transformer Engine the layers are the local ones.
"""

from __future__ import annotations

import importlib.util
import sys
import types
import typing
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from typing import Any

import cpu_megatron
import torch

COMPUTE_CAPABILITY = (9, 0)


class Stream:
    """A stream, and the context of one, on which everything has happened."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, other: Any) -> None:
        """Wait for nothing."""

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None: ...


def install() -> None:
    """Put it in place for the rest of the process, and import Megatron-LM."""
    cpu_megatron.install()
    _install_device()
    torch.compile = lambda model=None, **_: model if model is not None else lambda later: later
    if not hasattr(typing, "override"):
        typing.override = lambda method: method  # of Python 3.12, which Megatron-LM asks for
    with _triton():
        import megatron.training.argument_utils
    _find_helpers()
    megatron.core.tensor_parallel.random._set_cuda_rng_state = lambda *_, **__: None


def _install_device() -> None:
    """Have Megatron told that there is one device, whose memory is empty."""

    def is_megatron() -> bool:
        return sys._getframe(2).f_globals.get("__name__", "").startswith("megatron.")

    cuda, is_available = torch.cuda, torch.cuda.is_available
    cuda.is_available = lambda: is_megatron() or is_available()
    cuda.device_count = lambda: int(is_megatron())
    cuda.set_device = cuda.empty_cache = lambda *_: None
    cuda.get_device_capability = lambda *_: COMPUTE_CAPABILITY
    cuda.get_device_properties = lambda *_: types.SimpleNamespace(major=COMPUTE_CAPABILITY[0])
    cuda.memory_stats = lambda *_: defaultdict(int)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda *_: 0)
    cuda.device_memory_used = lambda *_: 0
    cuda.Stream = Stream
    cuda.current_stream = lambda *_: Stream()
    cuda.stream = lambda stream: stream


class _Kernels(types.ModuleType):
    """triton without a compiler: every name is a decorator or a type, and nothing can be launched."""

    __version__ = "0"
    __path__: typing.ClassVar[list[str]] = []

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None, is_package=True)
        self.language = self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kernel


class _Kernel:
    """`@jit`, `@jit(...)`, `constexpr`: whatever triton has."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __call__(self, kernel: Any) -> Any:
        """Return what is decorated."""
        return kernel


@contextmanager
def _triton() -> Iterator[None]:
    """Have `import triton` find something meanwhile, where it is not installed; torch must not see that."""
    if importlib.util.find_spec("triton") is not None:
        yield
        return
    names = ("triton", "triton.language")
    sys.modules |= dict.fromkeys(names, _Kernels("triton"))
    yield
    for name in names:
        del sys.modules[name]


def _find_helpers() -> None:
    """Take the compiled helpers of the data sets from an installed megatron-core, where a checkout has none."""
    import megatron.core.datasets
    from megatron.core.datasets import utils

    name = "megatron.core.datasets.helpers_cpp"
    if importlib.util.find_spec(name) is None:
        megatron.core.datasets.__path__ += [f"{entry}/megatron/core/datasets" for entry in sys.path]
    if importlib.util.find_spec(name) is not None:
        utils.compile_helpers = lambda: None
