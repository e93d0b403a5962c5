"""plugins/cuda/kernels.h from Python, on the memory of PyTorch's tensors."""

import ctypes
from collections.abc import Callable
from ctypes import POINTER, Structure, c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ELEMENTS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class Gate(IntEnum):
    SIGMOID, TANH, NONE = range(3)


class ExpPrecision(IntEnum):
    FLOAT32, FLOAT16, BFLOAT16 = range(3)


class Normalization(IntEnum):
    SOFTMAX, SCALING = range(2)


class FeatureMap(IntEnum):
    ELU, RELU = range(2)


class Sequence(Structure):
    _fields_ = [
        ("element", c_int),
        ("causal", c_bool),
        ("batch", c_int64),
        ("tokens", c_int64),
        ("channels", c_int64),
        ("query", c_void_p),
        ("key", c_void_p),
        ("value", c_void_p),
        ("lengths", c_void_p),
        ("output", c_void_p),
    ]


def _call(*fields: tuple[str, type]) -> type[Structure]:
    return type("Call", (Sequence,), {"_fields_": fields})


_GATE = (("gate", c_int), ("cpu_eps", c_float))
_HEADS = (
    ("heads", c_int64),
    ("kv_heads", c_int64),
    ("value_width", c_int64),
    ("key_tokens", c_int64),
    ("key_lengths", c_void_p),
)
CALLS = {
    "aft_simple": _call(("gate", c_int), ("cpu_key_channels", c_int64), ("cpu_eps", c_float)),
    "aft_full": _call(
        *_GATE,
        ("precision", c_int),
        ("cpu_methods", c_int * 7),
        ("position_bias", c_void_p),
        ("position_bias_width", c_int64),
        ("constant_bias", c_bool),
        ("packed_bias", c_void_p),
    ),
    "aft_local": _call(*_GATE, ("band", c_void_p), ("band_rows", c_int64), ("window", c_int64)),
    "aft_conv": _call(*_GATE, ("filter", c_void_p), ("heads", c_int64), ("taps", c_int64)),
    "efficient_attention": _call(*_HEADS, ("normalization", c_int), ("scale", c_float)),
    "linear_attention": _call(
        *_HEADS, ("feature_map", c_int), ("normalizer", c_int), ("eps", c_float)
    ),
    "fastformer": _call(("alpha_weight", c_void_p), ("beta_weight", c_void_p), ("heads", c_int64)),
    "layer_norm_fastformer": _call(
        ("norm_weight", c_void_p),
        ("norm_bias", c_void_p),
        ("epsilon", c_float),
        ("query_weight", c_void_p),
        ("query_bias", c_void_p),
        ("key_weight", c_void_p),
        ("key_bias", c_void_p),
        ("alpha_weight", c_void_p),
        ("beta_weight", c_void_p),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("heads", c_int64),
    ),
}
"""The parameter struct of every kernel, by stem, as plugins/cpu/kernels.h declares it."""


class Kernels:
    """libaft_cuda.so; the emulated one of the tests takes tensors of the CPU."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))

    def prepare(
        self,
        stem: str,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lengths: Tensor,
        *,
        causal: bool = False,
        **fields: Tensor | float,
    ) -> Callable[[], Tensor]:
        """Allocates for a call of a kernel; what is returned enqueues it on the current stream.

        Query and value are ``[B, T, D]`` with the channels side by side; so is the key, which is
        ``[B, T, H]`` for ``aft_conv``. ``fields`` are the other members of the struct; tensors are
        contiguous.

        Raises:
            RuntimeError: where the kernel refuses the call.
        """
        call, output = self._call(stem, query, key, value, lengths, causal=causal, **fields)
        workspace = self._workspace(stem, call, query)
        kernel = self._function(f"aft_cuda_{stem}", type(call), c_void_p, c_void_p)

        def run() -> Tensor:
            self._check(kernel(call, workspace.data_ptr(), _stream(query)))
            return output

        run.keeps = (query, key, value, lengths, fields)  # type: ignore[attr-defined]
        return run

    def prepare_product(
        self,
        weights: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lengths: Tensor,
        **fields: Tensor | float,
    ) -> Callable[[], Tensor]:
        """``prepare`` for AFT-full around a matrix product of PyTorch's.

        The weights are ``exp(position_bias - its row maxima)``, ``[T, T]``, in the precision of the
        tensors.
        """
        call, output = self._call("aft_full", query, key, value, lengths, causal=False, **fields)
        workspace = self._workspace("aft_full_prepare", call, query)
        entries = query.new_empty(*query.shape[:2], 2 * query.shape[2])
        products = torch.empty_like(entries)
        before = self._function("aft_cuda_aft_full_prepare", type(call), *[c_void_p] * 3)
        after = self._function("aft_cuda_aft_full_finish", type(call), *[c_void_p] * 2)

        def run() -> Tensor:
            stream = _stream(query)
            self._check(before(call, entries.data_ptr(), workspace.data_ptr(), stream))
            torch.matmul(weights, entries, out=products)
            self._check(after(call, products.data_ptr(), stream))
            return output

        run.keeps = (key, value, lengths, fields)  # type: ignore[attr-defined]
        return run

    def _call(
        self,
        stem: str,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lengths: Tensor,
        *,
        causal: bool,
        **fields: Tensor | float,
    ) -> tuple[Structure, Tensor]:
        if not (query.is_contiguous() and key.is_contiguous() and value.is_contiguous()):
            raise ValueError("expected contiguous tensors")
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        sequence = (
            ELEMENTS[query.dtype],
            causal,
            *query.shape,
            *(tensor.data_ptr() for tensor in (query, key, value, lengths, output)),
        )
        members = {
            name: field.data_ptr() if isinstance(field, Tensor) else field
            for name, field in fields.items()
        }
        return CALLS[stem](*sequence, **members), output

    def _workspace(self, stem: str, call: Structure, query: Tensor) -> Tensor:
        size = self._function(f"aft_cuda_{stem}_workspace", type(call))
        size.restype = c_size_t
        return torch.empty(size(call), dtype=torch.uint8, device=query.device)

    def _check(self, status: int) -> None:
        if status:
            text = self._library.aft_cuda_error_text
            text.restype = c_char_p
            said = text(status).decode()
            raise RuntimeError(f"the kernel was refused: {said} (cudaError_t {status})")

    def _function(self, name: str, call: type[Structure], *arguments: type) -> Any:
        function = self._library[name]
        function.argtypes = [POINTER(call), *arguments]
        return function


def _stream(tensor: Tensor) -> int | None:
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else None
