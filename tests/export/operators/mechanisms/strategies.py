"""Hypothesis strategies: any shape of a case, and inputs of extremes."""

import numpy as np
from hypothesis import strategies as st

from .cases import Case, Inputs, Variant, make_inputs

_HARD = [-1000.0, -100.0, -1.0, 0.0, 1.0, 88.0, 100.0, 1000.0]


@st.composite
def drawn_cases(draw: st.DrawFn) -> Case:
    """Draw cases of up to 70 tokens: any lengths, heads, windows and ranges."""
    tokens = draw(st.integers(1, 70))
    heads = draw(st.integers(1, 4))
    return Case(
        f"drawn {draw(st.integers(0, 999))}",
        tokens,
        tuple(draw(st.lists(st.integers(0, tokens), min_size=1, max_size=4))),
        channels=heads * draw(st.integers(1, 4)),
        heads=heads,
        window=draw(st.integers(1, 40)),
        spare=draw(st.integers(0, 9)),
        relative=draw(st.booleans()),
        spread=draw(st.sampled_from([0.01, 1.0, 10.0, 100.0])),
        arrangement=draw(
            st.sampled_from(["random", "dominating key", "opposed", "late large key"])
        ),
    )


@st.composite
def hard_inputs(draw: st.DrawFn, variant: Variant) -> Inputs:
    """Draw inputs of two channels and two heads; every number is one of a few extremes."""
    tokens = draw(st.integers(1, 5))
    lengths = (tokens, draw(st.integers(0, tokens)))
    inputs = make_inputs(variant.operator, Case("hard", tokens, lengths, channels=2, window=3))
    for name in variant.operator.required_inputs[:-1]:
        size = inputs[name].size
        values = draw(st.lists(st.sampled_from(_HARD), min_size=size, max_size=size))
        inputs[name] = np.array(values, dtype=np.float32).reshape(inputs[name].shape)
    return inputs
