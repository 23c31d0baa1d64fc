"""Two matrices whose product is exact in every floating-point type, and its checksum.

All elements are 1 or -1, by a hash of their place. An element of the product of two such matrices of even size is an
even number; below 512 even bfloat16 holds it exactly, whatever the order of the additions. So one checksum is right for
all types, kernels and devices. The checksum weighs each element by its row and column, so that errors do not cancel.
"""

from __future__ import annotations

from typing import Any

# Of the product, by size; computed with Python's integers (a test does it again for the small one).
CHECKSUMS = {256: 8_238_132, 1024: -39_161_546, 4096: -1_443_610_538}
LARGEST = 512  # no element of these products is as large
_ROWS, _COLUMNS = 97, 89  # weights go from 1 to these, and begin again
_MIX = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_MASK = 0xFFFFFFFF


def sign(row: int, column: int, salt: int) -> int:
    """Return the element at a place, 1 or -1. The salt tells the two matrices apart."""
    mixed = (row * _MIX[0] + column * _MIX[1] + salt * _MIX[2]) & _MASK
    mixed = ((mixed ^ (mixed >> 15)) * _MIX[1]) & _MASK
    mixed = ((mixed ^ (mixed >> 13)) * _MIX[2]) & _MASK
    return 1 - 2 * ((mixed >> 16) & 1)


def matrix(torch: Any, size: int, salt: int, device: str) -> Any:
    """Return one of the two matrices as int64, computed where it will be used."""
    places = torch.arange(size, dtype=torch.int64, device=device)
    mixed = (places[:, None] * _MIX[0] + places[None, :] * _MIX[1] + salt * _MIX[2]) & _MASK
    mixed = ((mixed ^ (mixed >> 15)) * _MIX[1]) & _MASK
    mixed = ((mixed ^ (mixed >> 13)) * _MIX[2]) & _MASK
    return 1 - 2 * ((mixed >> 16) & 1)


def checksum(torch: Any, product: Any) -> int:
    """Return the weighted sum of a product's elements; exact, because it stays far below 2^53."""
    rows, columns = (torch.arange(size, dtype=torch.float64, device=product.device) for size in product.shape)
    weighed = (rows % _ROWS + 1) @ product.to(torch.float64)
    return int((weighed * (columns % _COLUMNS + 1)).sum().item())


def exact_checksum(size: int) -> int:
    """Return the same from whole numbers alone: (weights of rows x first) x (second x weights of columns)."""
    total = 0
    for k in range(size):
        left = sum((row % _ROWS + 1) * sign(row, k, 1) for row in range(size))
        right = sum((column % _COLUMNS + 1) * sign(k, column, 2) for column in range(size))
        total += left * right
    return total
