"""The rule for AFT-full on a GPU: the fused kernel, or a matrix product of the runtime's library.

The library's product runs nearer to the peak of the GPU, but its entries pass through memory. So it
pays for long documents only. All rows are estimates until they are measured; 2,048 is also
``AFT_CUDA_AFT_FULL_GEMM_TOKENS`` of the kernels.
"""

from collections.abc import Collection
from dataclasses import dataclass

from aftexport.operators.position_bias_range import MAX_RANGE


@dataclass(frozen=True)
class Row:
    """One row of the rule.

    Attributes:
        family: the major number of the compute capability; None for every other GPU.
        precision: the precision of the product, which is that of the tensors.
        min_tokens: the number of tokens from which on the library's product is chosen.
    """

    family: int | None
    precision: str
    min_tokens: int


ROWS = (
    Row(family=None, precision="fp32", min_tokens=2048),
    Row(family=None, precision="fp16", min_tokens=2048),
    Row(family=None, precision="bf16", min_tokens=2048),
)
_MAX_RANGE = MAX_RANGE | {"fp32": MAX_RANGE["bf16"]}
"""float32 has the exponents of bfloat16."""


def is_long(precision: str, tokens: int, capabilities: Collection[int] = ()) -> bool:
    """Return whether documents are long enough for the library's product.

    Args:
        precision: the precision of the product.
        tokens: the number of tokens of the longest document.
        capabilities: the compute capabilities times 10 of all GPUs of an engine; none if unknown.
    """
    rows = {(row.family, row.precision): row.min_tokens for row in ROWS}
    default = rows[None, precision]
    families = [capability // 10 for capability in capabilities]
    return tokens >= max((rows.get((f, precision), default) for f in families), default=default)


def is_in_range(precision: str, row_range: float | None) -> bool:
    """Return whether the products of a position bias lose only rounding.

    Outside, too many outputs would be computed again by the definition, which is slow.
    """
    return row_range is not None and row_range <= _MAX_RANGE[precision]
