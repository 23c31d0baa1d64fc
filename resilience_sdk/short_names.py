"""Names in a given room, so that different ones stay different."""

from __future__ import annotations

import zlib


def shortened(name: str, most_bytes: int) -> str:
    """Return `name` in at most so many bytes of UTF-8: of a longer one the beginning, and a sum over the whole of it.

    The sum is the same in every process, so that ranks agree. The beginning alone is often common: a path, a template.
    """
    data = name.encode(errors="replace")
    if len(data) <= most_bytes:
        return name
    end = f"~{zlib.crc32(data):08x}"
    return data[: most_bytes - len(end)].decode(errors="ignore") + end
