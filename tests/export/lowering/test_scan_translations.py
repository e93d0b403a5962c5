from collections.abc import Callable

import numpy as np
import pytest
import torch
from tiny_models import Applied
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as attend

from aftexport.capture.capture import capture
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.lowering.finish import finish
from aftexport.lowering.to_onnx import lower

TOKENS = 6
Form = Callable[[Tensor], Tensor]


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (4, 4)).transpose(1, 2)


def mask(x: Tensor) -> Tensor:
    """bool ``[T, T]`` with a row that is masked throughout."""
    places = torch.arange(x.shape[1])
    return ((places[:, None] + places) % 3 != 0) & (places != 2)[:, None]


def added(x: Tensor) -> Tensor:
    return torch.zeros_like(mask(x), dtype=x.dtype).masked_fill(~mask(x), -torch.inf)


def beside(x: Tensor) -> Tensor:
    return torch.cat([x, -x, x], 1)


FORMS: dict[str, Form] = {
    "three axes": lambda x: attend(x, x, x),
    "five axes": lambda x: attend(*[x[:, None, None]] * 3)[:, 0, 0],
    "heads": lambda x: attend(*[heads(x)] * 3).transpose(1, 2).flatten(2),
    "causal": lambda x: attend(x, x, x, is_causal=True),
    "causal over more keys": lambda x: attend(x, beside(x), beside(x), is_causal=True),
    "bool mask": lambda x: attend(x, x, x, attn_mask=mask(x)),
    "bool mask of heads": lambda x: (
        attend(*[heads(x)] * 3, attn_mask=mask(x)).transpose(1, 2).flatten(2)
    ),
    "bool mask of documents": lambda x: attend(x, x, x, attn_mask=(x[..., 0] > 9)[:, None]),
    "added mask": lambda x: attend(x, x, x, attn_mask=added(x)),
    "scale": lambda x: attend(x, x, x, scale=0.3),
    "fewer heads of keys": lambda x: (
        attend(heads(x), heads(x)[:, :2], heads(x)[:, 2:], enable_gqa=True)
        .transpose(1, 2)
        .flatten(2)
    ),
}


@pytest.fixture(scope="module", params=[torch.float32, torch.float16], ids=["float32", "float16"])
def results(request: pytest.FixtureRequest) -> tuple[np.ndarray, np.ndarray, float]:
    """Return ONNX Runtime's and PyTorch's results, ``[batch, form, tokens, 16]``, and the bound."""
    half = request.param == torch.float16
    module = Applied(
        lambda x: torch.stack([form(x) for form in FORMS.values()], 1), rows=2 * TOKENS, width=16
    ).eval()
    model = finish(
        lower(capture(module, dtype=request.param)), precision="fp16" if half else "fp32"
    )
    ids = np.arange(2 * TOKENS).reshape(2, TOKENS)
    served = OnnxRuntimeEngine(model.SerializeToString()).run({"input_ids": ids})["logits"]
    with torch.inference_mode():
        expected = module.to(request.param).double()(torch.from_numpy(ids)).numpy()
    return served, expected, 5e-3 if half else 2e-6


@pytest.mark.parametrize("name", FORMS)
def test_attention_is_pytorchs(name: str, results: tuple[np.ndarray, np.ndarray, float]) -> None:
    served, expected, bound = results
    number = list(FORMS).index(name)
    np.testing.assert_allclose(served[:, number], expected[:, number], rtol=bound, atol=bound)


def test_a_row_masked_throughout_is_zero(results: tuple[np.ndarray, np.ndarray, float]) -> None:
    served = results[0]
    assert not served[:, list(FORMS).index("bool mask"), 2].any()
    assert not served[:, list(FORMS).index("added mask"), 2].any()
    assert not served[:, list(FORMS).index("bool mask of documents")].any()
