"""Element types: torch's and safetensors' names, one to one."""

from __future__ import annotations

import torch

from stockpot.errors import ErrorCode, StockpotError

_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def name_of(dtype: torch.dtype) -> str:
    """Like BF16. StockpotError INVALID_ARGUMENT for a type that the store does not have."""
    try:
        return _NAMES[dtype]
    except KeyError:
        raise StockpotError(
            ErrorCode.INVALID_ARGUMENT, f"tensors of {dtype} cannot be stored") from None


def dtype_of(name: str) -> torch.dtype:
    """The inverse of name_of(); StockpotError CORRUPTION for an unknown name."""
    try:
        return _DTYPES[name]
    except KeyError:
        raise StockpotError(ErrorCode.CORRUPTION, f"unknown element type {name!r}") from None
