"""NVML's ways to say no, and what each of them means for the one who asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Return codes of nvml.h. Numbers, because older bindings do not have all the names.
NO_PERMISSION = 4
DRIVER_NOT_LOADED = 9
LIBRARY_NOT_FOUND = 12
CORRUPTED_INFOROM = 14
LIB_RM_VERSION_MISMATCH = 18
TIMEOUT = 10
# This GPU, this driver or this machine does not have what was asked for.
_NOT_OFFERED = frozenset(
    {
        2,  # INVALID_ARGUMENT: a link or a sensor that this GPU does not have
        3,  # NOT_SUPPORTED
        6,  # NOT_FOUND
        13,  # FUNCTION_NOT_FOUND: the driver is older than the question
        21,  # NO_DATA
        22,  # VGPU_ECC_NOT_SUPPORTED
        25,  # ARGUMENT_VERSION_MISMATCH
        26,  # DEPRECATED
        27,  # NOT_READY
    }
)
# return code -> (what it means, cause in the taxonomy)
_BROKEN = {
    9: ("the kernel driver is not loaded", "environment_error"),
    10: ("the GPU's firmware (GSP) did not answer the driver in time", "gpu_gsp_timeout"),
    11: ("the GPU's interrupts do not arrive", "gpu_hardware_faulty"),
    15: ("the GPU has fallen off the bus", "gpu_fell_off_bus"),
    16: ("the GPU needs a reset", "gpu_hang"),
    17: ("the operating system refuses access to the GPU", "gpu_cuda_unknown_error"),
    18: ("the driver's library and its kernel module are of different versions", "environment_error"),
    29: ("the GPU is in an invalid state", "gpu_hang"),
    999: ("the driver cannot talk to the GPU, often because its firmware (GSP) is dead", "gpu_gsp_timeout"),
}


def code_of(error: BaseException) -> int | None:
    """Return the NVML return code of an exception; None when it is none of NVML's."""
    value = getattr(error, "value", None)
    return value if type(error).__module__ == "pynvml" and isinstance(value, int) else None


def not_offered(error: BaseException) -> bool:
    """Tell whether there is nothing to ask: an AttributeError is a binding that is older than the question."""
    return isinstance(error, AttributeError) or code_of(error) in _NOT_OFFERED


def answer(question: Callable[..., Any], *arguments: Any) -> Any:
    """Return the answer to a question to NVML, None where it is not offered; raises NVMLError for all else."""
    try:
        return question(*arguments)
    except Exception as error:
        if not_offered(error):
            return None
        raise


def meaning(error: BaseException) -> tuple[str, str]:
    """Return what an NVML error says about the GPU, and its cause in the taxonomy."""
    code = code_of(error)
    text, cause = _BROKEN.get(-1 if code is None else code, ("", "gpu_cuda_unknown_error"))
    said = f"{error} (NVML error {code})"
    return (f"{text}: {said}" if text else said), cause


def field_values(nvml: Any, handle: Any, fields: list[int | tuple[int, int]]) -> list[int | None]:
    """Return the integers of NVML fields, None for each that this GPU does not have.

    A field is its number, or its number and its scope (a link). Raises NVMLError when the whole question fails.
    """
    values: list[int | None] = []
    for value in nvml.nvmlDeviceGetFieldValues(handle, fields):
        values.append(_integer(value) if value.nvmlReturn == 0 else None)
    return values


# nvmlValueType_t, in its order
_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


def _integer(value: Any) -> int | None:
    return int(getattr(value.value, _MEMBERS[value.valueType])) if value.valueType < len(_MEMBERS) else None
