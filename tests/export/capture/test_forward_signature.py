from collections.abc import Callable
from typing import Any

import pytest
import tiny_models
import torch
from torch import Tensor, nn

from aftexport.capture.capture import capture
from aftexport.capture.forward_signature import ForwardSignature, with_plain_inputs
from aftexport.errors import TraceError

IDS, LENGTHS = torch.arange(6).view(2, 3), torch.tensor([3, 2])


def extras(input_ids: Any, lengths: Any = None, labels: Any = None) -> Any:
    return input_ids, lengths


def in_between(x: Any, labels: Any = None, lengths: Any = None) -> Any:
    return x, lengths


def by_name(*, lengths: Any, input_ids: Any, attention_mask: Any = None) -> Any:
    return input_ids, lengths


def by_position(ids: Any, mask: Any = None, lengths: Any = None, /, **options: Any) -> Any:
    assert mask is None
    return ids, lengths


def reversed_order(lengths: Any, input_ids: Any) -> Any:
    return input_ids, lengths


def ids_alone(tokens: Any, seq_lens: Any = None, max_length: int = 512) -> Any:
    return tokens, None


def anything(*args: Any, **kwargs: Any) -> Any:
    return *args, None


@pytest.mark.parametrize(
    ("forward", "takes_lengths", "left_out"),
    [
        (extras, True, ()),
        (in_between, True, ()),
        (by_name, True, ("attention_mask",)),
        (by_position, True, ("mask",)),
        (reversed_order, True, ()),
        (ids_alone, False, ("seq_lens",)),
        (anything, False, ("**kwargs",)),
    ],
)
def test_inputs_reach_matching_parameters(
    forward: Callable[..., Any], takes_lengths: bool, left_out: tuple[str, ...]
) -> None:
    class Module(nn.Module):
        pass

    module = Module()
    module.forward = forward  # type: ignore[method-assign]
    signature = ForwardSignature.of(module.forward)
    assert (signature.inputs == ("input_ids", "lengths")) is takes_lengths
    assert signature.left_out == left_out
    given = (IDS, LENGTHS) if takes_lengths else (IDS,)
    ids, lengths = with_plain_inputs(module, signature.inputs)(*given)
    assert ids is IDS
    assert lengths is (LENGTHS if takes_lengths else None)


@pytest.mark.parametrize(
    "forward",
    [
        lambda input_ids, mask: input_ids,
        lambda input_ids, lengths, *, labels: input_ids,
        lambda: None,
    ],
)
def test_other_parameters_are_refused(forward: Callable[..., Any]) -> None:
    with pytest.raises(TraceError, match=r"got parameters \("):
        ForwardSignature.of(forward)


class Masked(tiny_models.Bag):
    def forward(
        self, x: Tensor, labels: Tensor | None = None, lengths: Tensor | None = None
    ) -> Tensor:
        assert lengths is not None
        valid = torch.arange(x.shape[1]) < lengths[:, None]
        return self.head((self.embedding(x) * valid[..., None]).sum(1) / lengths[:, None])


def test_capture_takes_lengths_after_other_parameters() -> None:
    module = Masked().eval()
    program = capture(module)
    assert tuple(program.graph_signature.user_inputs) == ("input_ids", "lengths")
    torch.testing.assert_close(program.module()(IDS, LENGTHS), module(IDS, lengths=LENGTHS))
