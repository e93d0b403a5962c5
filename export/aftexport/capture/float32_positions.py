"""Positions, counts and lengths of a program in 16 bits, kept in float32.

The largest float16 is 65,504, and from 2,048 on it has no odd numbers; bfloat16 has none from 256
on. Numbers that depend on no token therefore stay in float32 until they meet numbers of tokens. So
do cumulative sums over tokens, quotients and products with such numbers, and results of operators
with a number beyond the range of 16 bits.
"""

import math
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Node

from aftexport.system.contract import LENGTHS, main_input
from aftexport.system.internals.torch_operators import OpOverload, pytree

_aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)
_LARGEST_EXACT = 256
"""The largest number up to which both types hold every whole number."""
_FACTORIES = frozenset(("eye", "full", "linspace", "ones", "scalar_tensor", "zeros"))
_SHAPED_LIKE = frozenset((
    "full_like", "new_full", "new_ones", "new_zeros", "ones_like", "zeros_like",
))  # fmt: skip
"""Operators that read only the shape and the type of a tensor."""
_CASTS = frozenset(("_to_copy", "to", "type_as"))
_FILLS = frozenset(("constant_pad_nd", "masked_fill", "pad", "where"))
_LAYOUT = _FILLS | frozenset((
    "alias", "broadcast_to", "cat", "chunk", "clone", "contiguous", "detach", "detach_", "expand",
    "expand_as", "flatten", "flip", "getitem", "lift_fresh_copy", "movedim", "narrow", "permute",
    "repeat", "reshape", "roll", "select", "slice", "split", "split_with_sizes", "squeeze", "stack",
    "t", "tile", "transpose", "tril", "triu", "unflatten", "unsqueeze", "view", "view_as",
))  # fmt: skip
_BOUNDED = frozenset(("_softmax", "cos", "erf", "sigmoid", "sin", "softmax", "tanh"))
"""Operators whose results are at most 1, so that 16 bits hold them as well as other numbers."""
_PRODUCTS = frozenset(("div", "mul"))
_SUMS = frozenset(("add", "rsub", "sub"))
_KEEPING = _LAYOUT | _SUMS | frozenset((
    "abs", "clamp", "clamp_max", "clamp_min", "maximum", "mean", "minimum", "neg", "pow",
    "reciprocal", "rsqrt", "sqrt", "square", "sum",
))  # fmt: skip
"""Operators that stay in float32 if all their numbers are in float32."""
_LOOKUPS = frozenset(("embedding", "gather", "index", "index_select"))


def keep_positions_float32(program: ExportedProgram, module: nn.Module) -> None:
    """Compute positions, counts, lengths and cumulative sums of a 16-bit program in float32.

    ``module`` is not cast yet, so that its parameters and buffers have all their digits.
    """
    exact = dict[str, Tensor](module.named_parameters(remove_duplicate=False))
    _Widener(program, exact | dict(module.named_buffers(remove_duplicate=False))).run()


class _Widener:
    """The nodes of a program by what they depend on.

    Constant nodes depend on weights only, free nodes also on sizes, integers and lengths, and all
    others on tokens. Small nodes have numbers that 16 bits hold well; plain ones also have only
    small inputs, so that they stay as they are.
    """

    def __init__(self, program: ExportedProgram, exact: Mapping[str, Tensor]) -> None:
        self._program = program
        self._graph = program.graph_module.graph
        self._exact = exact
        signature = program.graph_signature
        self._stored = {
            **signature.inputs_to_parameters,
            **signature.inputs_to_buffers,
            **signature.inputs_to_lifted_tensor_constants,
        }
        placeholders = {str(n.name): n for n in self._graph.find_nodes(op="placeholder")}
        main = placeholders[main_input(tuple(map(str, signature.user_inputs)))]
        self._token_symbols = _symbols(main.meta["val"].shape[1])
        self._constant: set[Node] = set()
        self._free: set[Node] = {placeholders[LENGTHS]} if LENGTHS in placeholders else set()
        self._small: set[Node] = set()
        self._plain: set[Node] = set()
        self._chosen: set[Node] = set()
        """The nodes that are computed in float32."""
        self._wide: dict[Node, Node] = {}
        self._rounded: dict[Node, Node] = {}
        self._readers: set[Node] = set()
        """The nodes that read float32."""

    def run(self) -> None:
        """Change the program."""
        nodes, written = list(self._graph.nodes), _written(self._graph.nodes)
        for node in nodes:
            if node.op == "placeholder":
                self._classify_stored(node)
            elif node.op == "call_function" and node not in written:
                self._classify(node)
        for node in nodes:
            if node.op in ("call_function", "output") and node not in self._chosen:
                self._read(node)
        self._store_wide()
        for node in reversed(nodes):
            if node in self._chosen and node.op == "call_function" and not node.users:
                self._graph.erase_node(node)
        self._program.graph_module.recompile()

    def _classify_stored(self, node: Node) -> None:
        """Take a weight for a constant, and a buffer of large numbers for positions."""
        if node.name not in self._stored:
            return
        parameters = self._program.graph_signature.inputs_to_parameters
        if node.name not in parameters and _is_half(node):
            exact = self._exact_of(node)
            finite = exact[exact.isfinite()].abs()
            if finite.numel() and finite.max() > _LARGEST_EXACT:
                self._free.add(node)
                self._chosen.add(node)
                return
        self._constant.add(node)

    def _classify(self, node: Node) -> None:
        name, inputs = _name(node), _inputs(node)
        if not name or not _has_tensors(node):
            return
        if name in _SHAPED_LIKE:
            inputs = []
        elif name in _CASTS:
            inputs = inputs[:1]  # another tensor gives only its type
        converts = name in _CASTS and not _is_half(inputs[0])
        if inputs and all(i in self._constant for i in inputs) and not converts:
            self._constant.add(node)
        elif all(i in self._constant or i in self._free for i in inputs):
            if name in _LOOKUPS and inputs[0] in self._constant:
                self._constant.add(node)  # a row of a table is a weight
                return
            self._free.add(node)
        of_booleans = converts and inputs[0].meta["val"].dtype == torch.bool
        if of_booleans or (node in self._free and self._is_small(node, name, inputs)):
            self._small.add(node)
            if of_booleans or all(i in self._plain | self._constant for i in inputs if _is_half(i)):
                self._plain.add(node)
        if not _is_half(node) or node in self._plain or node in self._constant:
            return
        of_integers = converts and not inputs[0].meta["val"].is_floating_point()
        if node in self._free or of_integers or self._mixes(node, name, inputs):
            self._chosen.add(node)

    def _is_small(self, node: Node, name: str, inputs: list[Node]) -> bool:
        if name in _BOUNDED:
            return True
        if name in _FACTORIES | _SHAPED_LIKE:
            return _largest_number(node) <= _LARGEST_EXACT
        keeps = name in _LAYOUT | _CASTS | _SUMS | {"abs", "mul", "neg"} and inputs
        return bool(keeps) and _largest_number(node) <= _LARGEST_EXACT and all(
            i in self._small or i in self._constant or i.meta["val"].dtype == torch.bool
            for i in inputs
        )  # fmt: skip

    def _mixes(self, node: Node, name: str, inputs: list[Node]) -> bool:
        """Return whether an operator on numbers of tokens needs float32."""
        has_tokens = any(_symbols(s) & self._token_symbols for s in _value(node).shape)
        if name in _PRODUCTS | _SUMS and _is_beyond(node, sizes=has_tokens):
            return True
        if not has_tokens:
            return False  # lowering.float32_sums widens these in the graph
        halves = [i for i in inputs if _is_half(i)]
        wide = [i in self._chosen and i not in self._small for i in halves]
        if name == "cumsum" or (name in _PRODUCTS and any(wide)):
            return True
        fits = (
            w or i in self._small or i in self._constant for w, i in zip(wide, halves, strict=True)
        )
        return name in _KEEPING and any(wide) and all(fits)

    def _read(self, node: Node) -> None:
        """Let a node that is not computed in float32 read nodes that are."""
        chosen = {i for i in node.all_input_nodes if i in self._chosen}
        if not chosen:
            return
        if node.target is _aten._assert_tensor_metadata.default:
            self._graph.erase_node(node)  # it expects 16 bits
            return
        takes_wide = isinstance(node.meta.get("val"), Tensor) and not _is_half(node)
        if takes_wide:
            self._readers.add(node)
        for value in node.all_input_nodes:
            if takes_wide and _is_half(value):
                node.replace_input_with(value, self._wide_of(value))
            elif value in chosen:
                node.replace_input_with(value, self._rounded_of(value))

    def _wide_of(self, node: Node) -> Node:
        """Return a 16-bit node in float32, computed there if it does not depend on tokens."""
        if node not in self._wide:
            if node.op == "placeholder" and node.name in self._stored:
                self._wide[node] = node  # see _store_wide
            elif node in self._chosen | self._free | self._constant:
                self._wide[node] = self._computed(node)
            else:
                self._wide[node] = self._cast(node, torch.float32)
        return self._wide[node]

    def _computed(self, node: Node) -> Node:
        def widened(value: Any) -> Any:
            if isinstance(value, Node):
                return self._wide_of(value) if _is_half(value) else value
            return torch.float32 if value in _HALVES else value

        name, target, args = _name(node), node.target, tuple[Any, ...](node.args)
        kwargs = dict(node.kwargs)
        if name == "type_as":
            target, args = _aten.to.dtype, (node.args[0], torch.float32)
        elif name in _SHAPED_LIKE:
            kwargs["dtype"] = torch.float32
        else:
            args, kwargs = pytree.tree_map(widened, (args, kwargs))
        with self._graph.inserting_before(node):
            made: Node = self._graph.call_function(target, args, kwargs)
        made.meta.update(node.meta, val=pytree.tree_map(Tensor.float, node.meta["val"]))
        self._readers.add(made)
        return made

    def _rounded_of(self, node: Node) -> Node:
        """Return a node that is computed in float32, rounded to its own type."""
        if node not in self._rounded:
            self._rounded[node] = self._cast(self._wide_of(node), _value(node).dtype)
            self._readers.add(self._rounded[node])
        return self._rounded[node]

    def _cast(self, node: Node, dtype: torch.dtype) -> Node:
        after = node
        while after.op == "placeholder" and after.next.op == "placeholder":
            after = after.next
        with self._graph.inserting_after(after):
            made: Node = self._graph.call_function(
                _aten._to_copy.default, (node,), {"dtype": dtype}
            )
        made.meta.update(node.meta, val=node.meta["val"].to(dtype))
        return made

    def _exact_of(self, node: Node) -> Tensor:
        """Return a stored tensor as it was trained, in float32."""
        name = self._stored[node.name]
        stored: Tensor = {**self._program.state_dict, **self._program.constants}[name].detach()
        exact = self._exact.get(name, stored).detach()
        return (exact if exact.shape == stored.shape else stored).float()

    def _store_wide(self) -> None:
        """Store the weights that float32 nodes read in float32, and round them for all others."""
        for node in [n for n, wide in self._wide.items() if n is wide]:
            others = [user for user in node.users if user not in self._readers]
            rounded = self._rounded_of(node) if others else None
            for user in others:
                assert rounded is not None
                user.replace_input_with(node, rounded)
            name, exact = self._stored[node.name], self._exact_of(node)
            held = self._program.state_dict
            if name not in held:
                held = self._program.constants
            held[name] = (
                nn.Parameter(exact, False) if isinstance(held[name], nn.Parameter) else exact
            )
            node.meta["val"] = node.meta["val"].float()


def _name(node: Node) -> str:
    """Return the name of an operator, without namespace and overload."""
    if node.target is operator.getitem:
        return "getitem"
    target = node.target
    return target._schema.name.partition("::")[2] if isinstance(target, OpOverload) else ""


def _value(node: Node) -> Tensor:
    """Return the value of a node, or its first one."""
    value = node.meta["val"]
    return value if isinstance(value, Tensor) else value[0]


def _inputs(node: Node) -> list[Node]:
    return [i for i in node.all_input_nodes if _has_tensors(i)]


def _has_tensors(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) or (
        isinstance(value, list | tuple)
        and bool(value)
        and all(isinstance(entry, Tensor) for entry in value)
    )


def _is_half(node: Node) -> bool:
    return _has_tensors(node) and _value(node).dtype in _HALVES


def _symbols(size: Any) -> set[str]:
    """Return the names of the free sizes that a size depends on."""
    return (
        {str(s) for s in size.node.expr.free_symbols} if isinstance(size, torch.SymInt) else set()
    )


def _largest_number(node: Node) -> float:
    """Return the largest size of a number among the arguments of a node, other than axes."""
    if _name(node) in _LAYOUT - _FILLS:
        return 0.0
    numbers = [abs(a) for a in node.args if isinstance(a, int | float)]
    return max(numbers, default=0.0)


def _is_beyond(node: Node, *, sizes: bool) -> bool:
    """Return whether an operator has a number beyond 16 bits, or with ``sizes`` a size."""
    is_size = any(
        isinstance(a, Node) and isinstance(a.meta.get("val"), torch.SymInt) for a in node.args
    )
    limit = torch.finfo(_value(node).dtype).max
    return (sizes and is_size) or limit < _largest_number(node) < math.inf


def _written(nodes: Any) -> set[Node]:
    """Return the nodes that an operator writes to, with the nodes they view and their views."""
    written: set[Node] = set()
    for node in nodes:
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            continue
        for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            while isinstance(value, Node):
                written.add(value)
                value = value.args[0] if _name(value) in _LAYOUT and value.args else None
            written.add(node)
    for node in nodes:
        viewed = node.args[0] if node.op == "call_function" and node.args else None
        if isinstance(viewed, Node) and viewed in written and _name(node) in _LAYOUT:
            written.add(node)
    return written
