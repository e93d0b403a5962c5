import re
from pathlib import Path

import pytest

from aftexport.engines import aft_full_rule
from aftexport.engines.aft_full_rule import ROWS, Row, is_long

HEADER = Path(__file__).parents[3] / "plugins" / "cuda" / "kernels.h"


def test_default_is_that_of_kernels() -> None:
    (tokens,) = re.findall(r"AFT_CUDA_AFT_FULL_GEMM_TOKENS = (\d+)", HEADER.read_text("utf-8"))
    defaults = {row.precision: row.min_tokens for row in ROWS if row.family is None}
    assert defaults == dict.fromkeys(("fp16", "bf16"), int(tokens))


def test_slowest_gpu_of_engine_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (Row(None, "fp16", 2000), Row(9, "fp16", 1000), Row(12, "fp16", 3000))
    monkeypatch.setattr(aft_full_rule, "ROWS", rows)
    assert is_long("fp16", 2000)
    assert not is_long("fp16", 1999)
    assert is_long("fp16", 1000, [90])
    assert not is_long("fp16", 999, [90])
    assert not is_long("fp16", 1000, [86, 90])
    assert is_long("fp16", 2000, [86, 90])
    assert not is_long("fp16", 2999, [120, 90])


def test_float32_keeps_the_kernel() -> None:
    assert not is_long("fp32", 1_000_000)
