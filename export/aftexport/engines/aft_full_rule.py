"""The rule for AFT-full on a GPU: the fused kernel, or a matrix product of the runtime's library.

The library's product runs nearer to the peak of the GPU, but its entries pass through memory. So it
pays for long documents only. All rows are estimates until they are measured; 2,048 is also
``AFT_CUDA_AFT_FULL_GEMM_TOKENS`` of the kernels.

float32 has no row: a library adds all keys to one float32 sum, whose error grows with the tokens.
The fused kernel adds segments of keys, whose error does not.
"""

from collections.abc import Collection
from dataclasses import dataclass


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
    Row(family=None, precision="fp16", min_tokens=2048),
    Row(family=None, precision="bf16", min_tokens=2048),
)


def is_long(precision: str, tokens: int, capabilities: Collection[int] = ()) -> bool:
    """Return whether documents are long enough for the library's product.

    Args:
        precision: the precision of the product; one without a row keeps the fused kernel.
        tokens: the number of tokens of the longest document.
        capabilities: the compute capabilities times 10 of all GPUs of an engine; none if unknown.
    """
    rows = {row.family: row.min_tokens for row in ROWS if row.precision == precision}
    if None not in rows:
        return False
    families = [capability // 10 for capability in capabilities]
    return tokens >= max((rows.get(f, rows[None]) for f in families), default=rows[None])
