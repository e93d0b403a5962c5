"""Parts of products that turn linear attention into another function: none may be rewritten."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn.functional import pad

from .layer import Layer, heads, merged


def _product(
    q: Tensor, k: Tensor, v: Tensor, columns: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """All of the product but its last column, and that."""
    q, k, v = map(heads, (q.relu(), k.relu(), v))
    out = q @ (k.transpose(2, 3) @ columns(v))
    return out[..., :-1], out[..., -1:] + 1e-3


def linear_padded_with_a_half(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    above, below = _product(q, k, v, lambda v: pad(v, (0, 1), value=0.5))
    return merged(above / below)


def linear_padded_with_a_half_and_no_eps(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    above, below = _product(q, k, v, lambda v: pad(v, (0, 1), value=0.5))
    return merged(above / (below - 1e-3))


def linear_padded_with_zeros(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    above, below = _product(q, k, v, lambda v: pad(v, (0, 1)))
    return merged(above / below)


def linear_padded_in_front(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    above, below = _product(q, k, v, lambda v: pad(v, (1, 0), value=1.0))
    return merged(above / below)


def linear_padded_by_two_numbers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The column of ones is the last but one, and not the one that divides."""
    above, below = _product(
        q, k, v, lambda v: pad(pad(v[..., 1:], (0, 1), value=1.0), (0, 1), value=2.0)
    )
    return merged(above / below)


def linear_padded_as_the_last_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A key more, whose features and value are 1."""
    q, k, v = map(heads, (q, k, v))
    q, k = q.relu(), pad(k.relu(), (0, 0, 0, 1), value=1.0)
    v = pad(pad(v, (0, 1), value=1.0), (0, 0, 0, 1), value=1.0)
    out = q @ (k.transpose(2, 3) @ v)
    return merged(out[..., :-1] / (out[..., -1:] + 1e-3))


def linear_padded_tokens(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Add a query whose output divides the others, as if tokens came before channels."""
    q, k, v = map(heads, (q, k, v))
    out = pad(q.relu(), (0, 0, 0, 1), value=1.0) @ (k.relu().transpose(2, 3) @ v)
    return merged(out[:, :, :-1] / (out[:, :, -1:] + 1e-3))


def linear_padded_two_columns_taken(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q.relu(), k.relu(), v))
    out = q @ (k.transpose(2, 3) @ pad(v, (0, 1), value=1.0))
    return merged(out[..., :-1] / (out[..., -2:].sum(-1, keepdim=True) + 1e-3))


def linear_padded_column_before_taken(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q.relu(), k.relu(), v))
    out = q @ (k.transpose(2, 3) @ pad(v, (0, 1), value=1.0))
    return merged(out[..., :-1] / (out[..., -2:-1] + 1e-3))


def linear_padded_clamped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q.relu(), k.relu(), v))
    out = q @ (k.transpose(2, 3) @ pad(v, (0, 1), value=1.0))
    return merged(out[..., :-1] / (out[..., -1:].clamp(max=1.0) + 1e-3))


def layers() -> dict[str, nn.Module]:
    """Return the layers by name."""
    found = [
        linear_padded_with_a_half, linear_padded_with_a_half_and_no_eps, linear_padded_with_zeros,
        linear_padded_in_front, linear_padded_by_two_numbers, linear_padded_as_the_last_key,
        linear_padded_tokens, linear_padded_two_columns_taken, linear_padded_column_before_taken,
        linear_padded_clamped,
    ]  # fmt: skip
    return {f.__name__: Layer(f) for f in found}
