from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models
import torch
from input_models import FEATURES, Masked, Sensors, Undeclared
from torch import Tensor, nn

from aftexport.capture.capture import capture
from aftexport.capture.input_spec import input_spec
from aftexport.capture.model_inputs import (
    ForwardSignature,
    features_of,
    with_plain_inputs,
)
from aftexport.capture.model_spec import InputSpec
from aftexport.errors import TraceError, UsageError

WITH_LENGTHS = ("input_features", "lengths")


class OfIds(nn.Module):
    num_features = 8

    def forward(self, input_ids: Tensor) -> Tensor:
        return input_ids


class Unnamed(nn.Module):
    """Takes features, without their number."""

    def forward(self, input_features: Tensor) -> Tensor:
        return input_features.mean(1)


def test_declared_number_is_found() -> None:
    module = Undeclared()
    assert features_of(Sensors()) == FEATURES
    assert features_of(module) is None
    module.config = SimpleNamespace(num_features=FEATURES)
    assert features_of(module) == FEATURES
    assert features_of(OfIds()) is None  # the word has another meaning there


@pytest.mark.parametrize(
    ("asked", "said"), [(5, "must be 4, the num_features of the model, got 5"), (0, "must be 4")]
)
def test_contradicting_option_is_refused(asked: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        features_of(Sensors(), asked)


@pytest.mark.parametrize("asked", [0, 1 << 17])
def test_number_outside_bounds_is_refused(asked: int) -> None:
    with pytest.raises(UsageError, match=f"from 1 to 65536, got {asked}"):
        features_of(Undeclared(), asked)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_features_stay_float32(dtype: torch.dtype) -> None:
    program = capture(Sensors(), dtype=dtype)
    assert input_spec(program) == InputSpec(WITH_LENGTHS, None, FEATURES, "", None)
    node = next(n for n in program.graph.nodes if n.name == "input_features")
    assert node.meta["val"].dtype == torch.float32


def test_option_declares_features() -> None:
    spec = input_spec(capture(Undeclared(), num_features=FEATURES))
    assert (spec.names, spec.num_features) == (("input_features",), FEATURES)


def test_undeclared_features_are_not_guessed() -> None:
    with pytest.raises(TraceError, match=r"number of features .* input_features") as refused:
        capture(Unnamed())
    assert "--features N" in refused.value.remedy
    with pytest.raises(TraceError) as refused:
        capture(Undeclared())
    assert "--features N" in refused.value.remedy


def test_forward_of_ids_takes_no_features() -> None:
    with pytest.raises(TraceError, match="takes features, got the parameter input_ids"):
        capture(tiny_models.Bag(), num_features=3)


def test_vocabulary_is_for_ids() -> None:
    with pytest.raises(UsageError, match="--vocab-size is for models of token ids"):
        input_spec(capture(Sensors()), 100)


def test_mask_is_made_from_lengths() -> None:
    module = Masked().eval()
    signature = ForwardSignature.of(module.forward, features=True)
    assert (signature.inputs, signature.has_mask, signature.left_out) == (WITH_LENGTHS, True, ())
    plain = with_plain_inputs(module, signature.inputs)
    features = torch.randn(2, 5, FEATURES)
    found = plain(features, torch.tensor([5, 3]))
    torch.testing.assert_close(found[0], module(features[:1])[0])
    torch.testing.assert_close(found[1], module(features[1:, :3])[0])


def test_mask_can_be_left_out() -> None:
    signature = ForwardSignature.for_inputs(Masked().forward, ("input_features",))
    assert signature.inputs == ("input_features",)
    assert signature.left_out == ("attention_mask",)


def test_uncapturable_mask_is_left_out() -> None:
    class Branching(Masked):
        def forward(self, inputs_embeds: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            if attention_mask is not None and bool(attention_mask.all()):
                attention_mask = None
            return super().forward(inputs_embeds, attention_mask)

    assert input_spec(capture(Branching())).names == ("input_features",)


@pytest.mark.parametrize(
    ("shape", "dtype", "said"),
    [((2, 8), torch.float32, "torch.float32"), ((2, 8, FEATURES), torch.float64, "float64")],
)
def test_program_of_other_features_is_refused(
    shape: tuple[int, ...], dtype: torch.dtype, said: str
) -> None:
    class Mean(nn.Module):
        def forward(self, input_features: Tensor) -> Tensor:
            return input_features.mean(1, keepdim=True)

    axes = {"input_features": {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens")}}
    program = torch.export.export(Mean(), (torch.zeros(shape, dtype=dtype),), dynamic_shapes=axes)
    with pytest.raises(TraceError, match=f"fixed number of features, got .*{said}"):
        input_spec(program)


TOKEN_IDS, LENGTHS = torch.arange(6).view(2, 3), torch.tensor([3, 2])


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
    given = (TOKEN_IDS, LENGTHS) if takes_lengths else (TOKEN_IDS,)
    ids, lengths = with_plain_inputs(module, signature.inputs)(*given)
    assert ids is TOKEN_IDS
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


class MaskedIds(tiny_models.Bag):
    def forward(
        self, x: Tensor, labels: Tensor | None = None, lengths: Tensor | None = None
    ) -> Tensor:
        assert lengths is not None
        valid = torch.arange(x.shape[1]) < lengths[:, None]
        return self.head((self.embedding(x) * valid[..., None]).sum(1) / lengths[:, None])


def test_capture_takes_lengths_after_other_parameters() -> None:
    module = MaskedIds().eval()
    program = capture(module)
    assert tuple(program.graph_signature.user_inputs) == ("input_ids", "lengths")
    torch.testing.assert_close(
        program.module()(TOKEN_IDS, LENGTHS), module(TOKEN_IDS, lengths=LENGTHS)
    )
