"""Checks of the text in a ``torch.export`` archive that torch evaluates, imports or calls.

The graph module becomes Python source, which contains the names of the archive unchanged. Targets
are attributes of the module torch, and torch calls the result. So operators are a list of allowed
names: they compute tensors from tensors. They do not read or write files, load libraries, or
allocate memory other than that of tensors.
"""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from aftexport.errors import CheckpointError
from aftexport.system.internals.torch_operators import OpOverload

SAFE_FORM = "Export it again with torch.export.save, or give its state dict and --factory."
_EXPRESSION_TOKEN = re.compile(
    r"\s+|'[su]\d+'|'-?\d+\.\d+'|precision=53\b|\w+(?:\.\d+)?|!=|[-+*/(),<>=&|~]"
)
_EXPRESSION_WORDS = frozenset(
    {"Symbol", "Integer", "Rational", "Float", "Add", "Mul", "Max", "Min", "Mod", "PythonMod"}
    | {"FloorDiv", "CeilDiv", "CleanDiv", "IntTrueDiv", "FloatTrueDiv", "ToFloat", "TruncToInt"}
    | {"CeilToInt", "FloorToInt", "RoundToInt", "TruncToFloat", "OpaqueUnaryFn_sqrt"}
    | {"Eq", "Ne", "Lt", "Le", "Gt", "Ge", "Abs", "And", "Or", "Not"}
    | {"positive", "nonnegative", "integer", "True", "False", "precision=53"}
)
_SIZE = re.compile(r"L\['\w+'\](\['\w+'\]|\[\d+\])*\.size\(\)\[\d+\]")
_POWER = re.compile(
    r"Pow\(Symbol\('[su]\d+'(, \w+=True)*\), Integer\([2-8]\)\)|\b[su]\d+\*\*[2-8]\b(?!\s*\*\*)"
)
"""A small power of one symbol: the evaluation of other powers may not end."""
_SYMBOL = re.compile(r"[a-z]{1,3}\d{1,6}")
_MAX_POWER = 8
_MAX_EXPRESSION_CHARACTERS = 2000
_LOCAL_NAMES = ("name", "as_name")
_ATTRIBUTE_NAMES = (
    "parameter_name", "buffer_name", "tensor_constant_name", "custom_obj_name",
    "user_input_name", "fqn",
)  # fmt: skip
_SIZE_ARGUMENTS = frozenset({"size", "repeats", "output_size", "dims"})
_COUNT_OPERATORS = re.compile(
    r"torch\.ops\.aten\.(arange|linspace|logspace|eye|randperm|one_hot|bincount|histc|pad"
    r"|constant_pad_nd|repeat_interleave|nonzero_static|(tril|triu)_indices|\w+_window)\.\w+"
)
_MAX_AXES = 64
_MAX_ELEMENTS = 1 << 28
"""The maximum elements of a tensor whose size comes from numbers in the text."""


def check_content(path: Path, content: Any) -> None:
    """Check all parts of the JSON in an archive that torch evaluates, imports or calls.

    Raises:
        CheckpointError: if an expression, guard, structure, name, operator or size is refused;
            the error names it.
    """
    for item in _dicts_in(content):
        _check_expressions(path, item)
        _check_names(path, item)
        _check_node(path, item)


def _dicts_in(content: Any) -> Iterator[dict[str, Any]]:
    stack = [content]
    while stack:
        item = stack.pop()
        if isinstance(item, list):
            stack.extend(item)
        elif isinstance(item, dict):
            stack.extend(item.values())
            yield item


def _check_expressions(path: Path, item: dict[str, Any]) -> None:
    expression = item.get("expr_str", "")
    if not isinstance(expression, str) or not _is_arithmetic(expression):
        _refuse(path, "shape expression", expression)
    for guard in item.get("guards_code") or []:
        if not isinstance(guard, str) or not _is_arithmetic(_SIZE.sub("s0", guard)):
            _refuse(path, "guard expression", guard)
    for symbol in item.get("range_constraints") or {}:
        if not _SYMBOL.fullmatch(symbol):
            _refuse(path, "symbol", symbol)
    for name in ("in_spec", "out_spec"):
        if (spec := item.get(name)) and not _is_plain_structure(json.loads(spec)[1]):
            _refuse(path, "structure of inputs", spec)


def _check_names(path: Path, item: dict[str, Any]) -> None:
    names = [item[key] for key in _LOCAL_NAMES if key in item]
    names += item.get("forward_arg_names") or []
    names += _keywords(item["in_spec"]) if item.get("in_spec") else []
    for name in names:
        if isinstance(name, str) and name and not name.isidentifier():
            _refuse(path, "name", name)
    for name in (item[key] for key in _ATTRIBUTE_NAMES if key in item):
        if isinstance(name, str) and (not name.isprintable() or set(name) & {'"', "\\"}):
            _refuse(path, "name", name)


def _keywords(spec: str) -> list[str]:
    """Return the names of arguments in a structure of inputs, ``(arguments, keywords)``."""
    top = json.loads(spec)[1]
    children = top.get("children_spec") or []
    names = []
    for child in (top, *children):
        context = child.get("context")
        keys = json.loads(context) if isinstance(context, str) else context
        names += keys if isinstance(keys, list) else []
    return names


def _check_node(path: Path, item: dict[str, Any]) -> None:
    for target in (item.get("target"), item.get("as_operator")):
        if isinstance(target, str) and not (is_allowed(target) or _is_small_power(item)):
            raise CheckpointError(
                path,
                "its graph may call only functional operators of aten and operators of aftexport, "
                f"got {target[:100]!r}",
                "Export the model without it, or give its state dict and --factory.",
            )
    target, inputs = item.get("target"), item.get("inputs")
    if not isinstance(target, str) or not isinstance(inputs, list):
        return
    for argument in inputs:
        numbers = [abs(number) for number in _integers(argument.get("arg")) if number]
        if argument.get("name") in _SIZE_ARGUMENTS:
            elements = math.prod(numbers[:_MAX_AXES])
        elif _COUNT_OPERATORS.fullmatch(target):
            elements = max(numbers, default=0)
        else:
            continue
        if elements > _MAX_ELEMENTS:
            raise CheckpointError(
                path,
                f"a tensor in it may have at most {_MAX_ELEMENTS} elements, got {target[:100]!r} "
                f"with {argument['name']} {numbers[:8]}",
                SAFE_FORM,
            )


def _is_small_power(item: dict[str, Any]) -> bool:
    """Return whether a node is the power of a size to a small number in the text."""
    inputs = item.get("inputs") or [{}]
    exponent = inputs[-1].get("arg", {}).get("as_int")
    return (
        item.get("target") == "_operator.pow"
        and len(inputs) == 2
        and isinstance(exponent, int)
        and 0 <= exponent <= _MAX_POWER
    )


def _integers(argument: Any) -> list[int]:
    """Return the integers in an argument of a node, also those among symbols."""
    stack, integers = [argument], []
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)
        elif isinstance(item, int):
            integers.append(int(item))
    return integers


def _refuse(path: Path, subject: str, text: object) -> None:
    raise CheckpointError(path, f"its {subject} {str(text)[:80]!r} may be code", SAFE_FORM)


def _is_plain_structure(spec: Any) -> bool:
    """Return whether a structure has only tuples, lists and dicts; others import a class."""
    if not isinstance(spec, dict):
        return False
    context = spec.get("context")
    keys = json.loads(context) if isinstance(context, str) else context
    return (
        spec.get("type") in (None, "builtins.tuple", "builtins.list", "builtins.dict")
        and (keys is None or (isinstance(keys, list) and all(isinstance(k, str) for k in keys)))
        and all(_is_plain_structure(child) for child in spec.get("children_spec", []))
    )


def _is_arithmetic(expression: str) -> bool:
    """Return whether an expression has only sums and products of symbols, without code."""
    if len(expression) > _MAX_EXPRESSION_CHARACTERS:
        return False
    expression = _POWER.sub("s0", expression)
    tokens = _EXPRESSION_TOKEN.findall(expression)
    words = [t for t in tokens if t[0].isalpha() or t[0] == "_"]
    return (
        "".join(tokens) == expression
        and "**" not in expression
        and all(w in _EXPRESSION_WORDS or re.fullmatch(r"[su]\d+", w) for w in words)
    )


_FUNCTIONAL = frozenset(
    """
    __and__ __iand__ __ior__ __ixor__ __lshift__ __or__ __rshift__ __xor__ _adaptive_avg_pool2d
    _adaptive_avg_pool3d _assert_async _assert_scalar _assert_tensor_metadata _cast_Byte _cast_Char
    _cast_Double _cast_Float _cast_Half _cast_Int _cast_Long _cast_Short _cdist_forward _conj
    _conj_physical _convolution _convolution_mode _dim_arange _embedding_bag
    _embedding_bag_forward_only _euclidean_dist _fft_c2c _fft_c2r _fft_r2c _functional_assert_async
    _functional_assert_scalar _functional_sym_constrain_range
    _functional_sym_constrain_range_for_size _fused_rms_norm _is_all_true _is_any_true _linalg_det
    _linalg_eigh _linalg_eigvals _linalg_slogdet _linalg_solve_ex _linalg_svd _local_scalar_dense
    _log_softmax _native_batch_norm_legit_functional _native_batch_norm_legit_no_training
    _native_multi_head_attention _pad_circular _pad_enum _pdist_forward _prelu_kernel _reshape_alias
    _safe_softmax _scaled_dot_product_attention_math _scaled_dot_product_efficient_attention
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu _shape_as_tensor
    _softmax _to_copy _transformer_encoder_layer_fwd _trilinear _unique _unique2 _unsafe_index
    _unsafe_index_put _unsafe_masked_index _unsafe_masked_index_put_accumulate _unsafe_view
    _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d
    _upsample_nearest_exact2d _upsample_nearest_exact3d _weight_norm _weight_norm_interface abs
    absolute acos acosh adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d add addbmm addcdiv addcmul addmm
    addmv addr adjoint affine_grid_generator alias alias_copy all allclose alpha_dropout amax amin
    aminmax angle any arange arccos arccosh arcsin arcsinh arctan arctan2 arctanh argmax argmin
    argsort argwhere as_strided as_strided_copy as_strided_scatter asin asinh atan atan2 atanh
    atleast_1d atleast_2d atleast_3d avg_pool1d avg_pool2d avg_pool3d baddbmm bartlett_window
    batch_norm bernoulli bilinear binary_cross_entropy binary_cross_entropy_with_logits bincount
    bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor
    blackman_window block_diag bmm broadcast_tensors broadcast_to bucketize cartesian_prod cat cdist
    ceil celu chain_matmul channel_shuffle cholesky cholesky_inverse cholesky_solve chunk clamp
    clamp_max clamp_min clip clone col2im column_stack combinations complex concat concatenate conj
    conj_physical constant_pad_nd contiguous conv1d conv2d conv3d conv_tbc conv_transpose1d
    conv_transpose2d conv_transpose3d convolution copy copysign corrcoef cos cosh
    cosine_embedding_loss cosine_similarity count_nonzero cov cross cross_entropy_loss cummax cummin
    cumprod cumsum cumulative_trapezoid deg2rad det detach detach_copy diag diag_embed diagflat
    diagonal diagonal_copy diagonal_scatter diff digamma dim dist div divide dot dropout dsplit
    dstack einsum elu embedding embedding_bag embedding_renorm empty empty_like empty_permuted
    empty_strided eq equal erf erfc erfinv exp exp2 expand expand_as expand_copy expm1 exponential
    eye fake_quantize_per_channel_affine fake_quantize_per_tensor_affine feature_alpha_dropout
    feature_dropout fill flatten flip fliplr flipud float_power floor floor_divide fmax fmin fmod
    frac frexp frobenius_norm full full_like gather gcd ge gelu ger glu gradient greater
    greater_equal grid_sampler grid_sampler_2d grid_sampler_3d group_norm gru gru_cell gt
    hamming_window hann_window hardshrink hardsigmoid hardswish hardtanh heaviside
    hinge_embedding_loss histc hsplit hstack huber_loss hypot i0 igamma igammac im2col imag index
    index_add index_copy index_fill index_put index_reduce index_select inner instance_norm inverse
    is_complex is_contiguous is_floating_point is_nonzero is_same_size is_signed isclose isfinite
    isin isinf isnan isneginf isposinf isreal istft item kaiser_window kl_div kron kthvalue l1_loss
    layer_norm lcm ldexp le leaky_relu lerp less less_equal lgamma lift lift_fresh lift_fresh_copy
    linear linspace log log10 log1p log2 log_sigmoid log_sigmoid_forward log_softmax logaddexp
    logaddexp2 logcumsumexp logdet logical_and logical_not logical_or logical_xor logit logspace
    logsumexp lstm lstm_cell lt mH mT margin_ranking_loss masked_fill masked_scatter masked_select
    matmul matrix_H matrix_exp matrix_power max max_pool1d max_pool1d_with_indices max_pool2d
    max_pool2d_with_indices max_pool3d max_pool3d_with_indices maximum mean median meshgrid min
    minimum mish mm mode moveaxis movedim mse_loss msort mul multinomial multiply mv mvlgamma
    nan_to_num nanmean nanmedian nanquantile nansum narrow narrow_copy native_batch_norm
    native_channel_shuffle native_dropout native_group_norm native_layer_norm native_norm ne neg
    negative new_empty new_empty_strided new_full new_ones new_zeros nextafter nll_loss
    nll_loss_forward nll_loss_nd nonzero nonzero_numpy nonzero_static norm norm_except_dim normal
    normal_functional not_equal nuclear_norm numel numpy_T one_hot ones ones_like outer pad
    pad_sequence pairwise_distance pdist permute permute_copy pinverse pixel_shuffle pixel_unshuffle
    poisson polar polygamma positive pow prelu prod quantile rad2deg rand rand_like randint
    randint_like randn randn_like random randperm ravel real reciprocal reflection_pad1d
    reflection_pad2d reflection_pad3d relu relu6 remainder renorm repeat repeat_interleave
    replication_pad1d replication_pad2d replication_pad3d reshape reshape_as resolve_conj
    resolve_neg result_type rms_norm rnn_relu rnn_relu_cell rnn_tanh rnn_tanh_cell roll rot90 round
    row_stack rrelu rsqrt rsub scalar_tensor scaled_dot_product_attention scatter scatter_add
    scatter_reduce searchsorted select select_copy select_scatter selu sgn sigmoid sign signbit silu
    sin sinc sinh size slice slice_copy slice_scatter slogdet smooth_l1_loss soft_margin_loss
    softmax softplus softshrink sort split split_copy split_with_sizes split_with_sizes_copy sqrt
    square squeeze squeeze_copy stack std std_mean stft storage_offset stride sub subtract sum
    sum_to_size svd swapaxes swapdims sym_constrain_range sym_constrain_range_for_size
    sym_is_contiguous sym_numel sym_size sym_storage_offset sym_stride t t_copy take take_along_dim
    tan tanh tensor_split tensordot threshold tile to topk trace transpose transpose_copy trapezoid
    trapz tril tril_indices triplet_margin_loss triu triu_indices true_divide trunc type_as unbind
    unbind_copy unflatten unfold unfold_copy uniform unique_consecutive unique_dim unsafe_chunk
    unsafe_split unsafe_split_with_sizes unsqueeze unsqueeze_copy upsample_bicubic2d
    upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d
    upsample_trilinear3d vander var var_mean vdot view view_as view_as_complex view_as_complex_copy
    view_as_real view_as_real_copy view_copy vsplit vstack where xlogy zero zeros zeros_like
    """.split()  # noqa: SIM905
)
"""Operators of aten by name. Their variants in place, with one more underscore, write only to a
tensor of the program."""
_FAMILIES = re.compile(r"(fft|linalg|special)_[a-z0-9_]+")
"""Families of aten that hold only functional operators."""
_OUTSIDE_ATEN = frozenset(
    [f"_operator.{name}" for name in (
        "eq", "ne", "le", "ge", "lt", "gt", "neg", "pos", "mul", "add", "sub", "floordiv", "mod",
        "truediv", "and_", "or_", "rshift", "getitem")]
    + ["math.trunc", "math.floor", "math.ceil"]
    + [f"torch.{name}" for name in (
        "sym_int", "sym_float", "sym_not", "sym_ite", "sym_max", "sym_min", "_sym_sqrt")]
    + [f"torch.ops.higher_order.{name}" for name in (
        "associative_scan", "cond", "invoke_subgraph", "map_impl", "scan", "while_loop",
        "wrap_with_autocast", "wrap_with_set_grad_enabled")]
    + [f"torch._functorch.predispatch.{name}" for name in (
        "_add_batch_dim", "_remove_batch_dim", "_vmap_decrement_nesting",
        "_vmap_increment_nesting", "lazy_load_decompositions")]
)  # fmt: skip
"""Arithmetic on sizes, without powers, whose evaluation may not end; calls of graphs, whose own
targets are checked too; and the parts of torch.vmap."""
_OPERATOR = re.compile(r"torch\.ops\.(aten|aftexport)\.(\w+)\.(\w+)", re.ASCII)


def is_allowed(target: str) -> bool:
    """Return whether a program may call ``target``, a name in an archive."""
    if target in _OUTSIDE_ATEN:
        return True
    if (match := _OPERATOR.fullmatch(target)) is None:
        return False
    namespace, name, overload = match.groups()
    if namespace == "aten" and not _is_listed(name) and not _is_listed(name.removesuffix("_")):
        return False
    operator = getattr(getattr(getattr(torch.ops, namespace), name, None), overload, None)
    return isinstance(operator, OpOverload) and _writes_to_itself_only(operator)


def _is_listed(name: str) -> bool:
    return name in _FUNCTIONAL or _FAMILIES.fullmatch(name) is not None


def _writes_to_itself_only(operator: OpOverload) -> bool:
    """Return whether an operator writes at most its first argument, and only in place."""
    arguments = operator._schema.arguments
    written = [i for i, a in enumerate(arguments) if a.alias_info and a.alias_info.is_write]
    in_place = operator._schema.name.endswith("_") or operator._schema.name.endswith("__")
    return not written or (written == [0] and in_place)
