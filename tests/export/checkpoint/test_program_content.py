import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from archives import Members, argument, decoded, graph, nodes_of, rewritten
from bad_models import MARKER
from commands import listing
from torch.utils.checkpoint import checkpoint

from aftexport.checkpoint import load, program_archive
from aftexport.checkpoint.program_content import is_allowed
from aftexport.errors import CheckpointError

VICTIM = "victim.txt"
Nodes = list[dict[str, Any]]
Content = dict[str, Any]


def mapped(folder: Path, where: str = "from_file") -> Nodes:
    """Return nodes that map a file and overwrite it."""
    size = {"as_int": 16}
    outputs = [{"as_tensor": {"name": "mapped"}}]
    mapping = {
        "target": f"torch.ops.aten.{where}.default",
        "inputs": [
            argument("filename", "as_string", str(folder / VICTIM)),
            argument("shared", "as_bool", True),
            argument("size", "as_int", size["as_int"]),
            {"name": "dtype", "arg": {"as_scalar_type": 1}, "kind": 2},
        ],
        "outputs": outputs,
        "metadata": {},
    }
    filling = {
        "target": "torch.ops.aten.fill_.Scalar",
        "inputs": [
            argument("self", "as_tensor", {"name": "mapped"}),
            argument("value", "as_int", 0),
        ],
        "outputs": [{"as_tensor": {"name": "filled"}}],
        "metadata": {},
    }
    return [mapping, filling]


def with_nodes(content: Content, nodes: Nodes) -> None:
    """Put nodes that make 16 bytes in front of a graph."""
    meta = {
        "dtype": 1, "sizes": [{"as_int": 16}], "requires_grad": False, "device": {"type": "cpu"},
        "strides": [{"as_int": 1}], "storage_offset": {"as_int": 0}, "layout": 7,
    }  # fmt: skip
    graph_of = content["graph_module"]["graph"]
    graph_of["nodes"] = nodes + graph_of["nodes"]
    graph_of["tensor_values"] |= {"mapped": meta, "filled": meta}


def in_subgraph(content: Content, nodes: Nodes) -> None:
    block = {"nodes": nodes, "inputs": [], "outputs": [], "tensor_values": {}}
    block |= {"sym_int_values": {}, "sym_bool_values": {}}
    called = argument("", "as_graph", {"name": "block", "graph": block})
    target = "torch.ops.higher_order.wrap_with_set_grad_enabled"
    node = {"target": target, "inputs": [called], "outputs": [], "metadata": {}}
    nodes_of(content).insert(0, node)


def in_argument(content: Content, nodes: Nodes) -> None:
    nodes_of(content)[0]["inputs"].append(argument("", "as_operator", nodes[0]["target"]))


def in_module_call(content: Content, nodes: Nodes) -> None:
    signature = content["graph_module"]["module_call_graph"][0]["signature"]
    signature["inputs"].append({"as_operator": nodes[0]["target"]})


@pytest.mark.parametrize("place", [with_nodes, in_subgraph, in_argument, in_module_call])
def test_file_mapping_is_refused_everywhere(
    place: Callable[[Content, Nodes], None], program_file: Path, tmp_path: Path
) -> None:
    (tmp_path / VICTIM).write_text("precious content")
    model = rewritten(program_file, tmp_path, graph(lambda c: place(c, mapped(tmp_path))))
    before = listing(tmp_path)
    with pytest.raises(CheckpointError, match=r"got 'torch\.ops\.aten\.from_file\.default'"):
        load(model)
    assert listing(tmp_path) == before


def test_attack_without_check_overwrites_file(
    program_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the check, the very nodes of the tests above write."""
    (tmp_path / VICTIM).write_text("precious content")
    attack = graph(lambda content: with_nodes(content, mapped(tmp_path)))
    model = rewritten(program_file, tmp_path, attack)
    monkeypatch.setattr(program_archive, "check_content", lambda *_: None)
    program = load(model).program
    assert program is not None
    program.module()(torch.zeros((2, 16), dtype=torch.int64), torch.tensor([16, 16]))
    assert (tmp_path / VICTIM).read_bytes() == bytes(16)


def name_of_node(code: str) -> Callable[[Content], None]:
    """Rename a tensor wherever it stands, so that the program stays whole."""

    def change(content: Content) -> None:
        outputs = [output for node in nodes_of(content) for output in node["outputs"]]
        name = next(o["as_tensor"]["name"] for o in outputs if "as_tensor" in o)
        text = json.dumps(content).replace(json.dumps(name), json.dumps(f"{name} = {code}\n    x"))
        content.clear()
        content.update(json.loads(text))

    return change


def name_of_keyword(code: str) -> Callable[[Content], None]:
    def change(content: Content) -> None:
        leaf = {"type": None, "context": None, "children_spec": []}
        leaves = [
            {"type": "builtins.tuple", "context": "null", "children_spec": []},
            {
                "type": "builtins.dict",
                "context": json.dumps(["input_ids", f"lengths={code}"]),
                "children_spec": [leaf, leaf],
            },
        ]
        spec = {"type": "builtins.tuple", "context": "null", "children_spec": leaves}
        signature = content["graph_module"]["module_call_graph"][0]["signature"]
        signature["in_spec"] = json.dumps([1, spec])

    return change


def name_of_argument(code: str) -> Callable[[Content], None]:
    def change(content: Content) -> None:
        nodes_of(content)[0]["inputs"][0]["name"] = f"x={code}, y"

    return change


def name_in_signature(code: str) -> Callable[[Content], None]:
    def change(content: Content) -> None:
        signature = content["graph_module"]["module_call_graph"][0]["signature"]
        signature["forward_arg_names"] = ["input_ids", f"lengths={code}"]

    return change


def name_of_parameter(code: str) -> Callable[[Content], None]:
    def change(content: Content) -> None:
        specs = content["graph_module"]["signature"]["input_specs"]
        parameter = next(spec["parameter"] for spec in specs if "parameter" in spec)
        parameter["parameter_name"] = f'x") or {code} or ("'

    return change


@pytest.mark.parametrize(
    "place",
    [name_of_node, name_of_keyword, name_of_argument, name_in_signature, name_of_parameter],
)
def test_name_holding_code_stays_a_name(
    place: Callable[[str], Callable[[Content], None]], program_file: Path, tmp_path: Path
) -> None:
    code = f"__import__('os').mkdir({str(tmp_path / MARKER)!r})"
    model = rewritten(program_file, tmp_path, graph(place(code)))
    before = listing(tmp_path)
    with pytest.raises(CheckpointError, match=r"its name .* may be code"):
        load(model)
    assert listing(tmp_path) == before


def test_second_list_of_members_is_refused(program_file: Path, tmp_path: Path) -> None:
    """Python finds the list before the end of the file, torch the one at the offset it names."""

    def stored(members: Members) -> bytes:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            for name, content in members:
                archive.writestr(zipfile.ZipInfo(name), content)
        return buffer.getvalue()

    with zipfile.ZipFile(program_file) as archive:
        good = [(name, archive.read(name)) for name in archive.namelist()]
    hostile = [(n, c.replace(b"aten.linear", b"aten.matmul")) for n, c in good]
    end = 22
    (tmp_path / "model.pt2").write_bytes(stored(hostile)[:-end] + stored(good))
    assert hostile != good
    with pytest.raises(CheckpointError, match="two lists of its members"):
        load(tmp_path / "model.pt2")


def huge_fill(content: Content) -> None:
    size = argument("size", "as_ints", [1 << 20, 1 << 20])
    node = {"target": "torch.ops.aten.zeros.default", "inputs": [size]}
    with_nodes(content, [node | {"outputs": [{"as_tensor": {"name": "mapped"}}], "metadata": {}}])


def huge_range(content: Content) -> None:
    node = {
        "target": "torch.ops.aten.arange.default",
        "inputs": [argument("end", "as_int", 1 << 40)],
    }
    with_nodes(content, [node | {"outputs": [{"as_tensor": {"name": "mapped"}}], "metadata": {}}])


def many_symbols(content: Content) -> None:
    content["range_constraints"]["u99999999999"] = {"min_val": 0, "max_val": 9}


def huge_weight(config: dict[str, Any]) -> None:
    weight = next(iter(config["config"].values()))
    weight["tensor_meta"]["sizes"] = [{"as_int": 1 << 40}]


def weight_of_nothing(members: Members) -> Members:
    return [(n, b"" if n.endswith("/weight_0") else c) for n, c in members]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (graph(huge_fill), "at most 268435456 elements, got 'torch.ops.aten.zeros.default'"),
        (graph(huge_range), "at most 268435456 elements, got 'torch.ops.aten.arange.default'"),
        (graph(many_symbols), "symbol 'u99999999999'"),
        (decoded(huge_weight, "weights_config.json"), r"elements, got \d+ bytes"),
        (weight_of_nothing, r"elements, got \d+ bytes"),
    ],
)
def test_program_takes_bounded_memory(
    change: Callable[[Members], Members], reason: str, program_file: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=reason):
        load(rewritten(program_file, tmp_path, change))


class Blocks(tiny_models.Bag):
    """Code that torch.export keeps as written: in place, in blocks, on sizes."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        x = x.masked_fill_(x > 3, 0)
        x += x.shape[1] // 2 + x.shape[1] % 3
        with torch.no_grad():
            y = torch.zeros_like(x)
            y[:, 0] = x[:, 0].add_(1).clamp_(-1, 1)
        x = torch.cond(x.sum() > 0, lambda x, y: x + y, lambda x, y: x - y, (x, y))
        x = torch.vmap(torch.tanh)(checkpoint(torch.relu, x, use_reentrant=False))
        tokens = x.shape[1]
        scale = torch.sym_sqrt(tokens) * tokens**2 - (-tokens // 4)
        return self.head(x.mean(1)) / scale  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("decompose", [False, True])
def test_honest_program_computes_same_numbers(decompose: bool, tmp_path: Path) -> None:
    module, ids = Blocks(), torch.arange(32).reshape(2, 16)
    shapes = ({1: torch.export.Dim("tokens", min=2, max=64)},)
    program = torch.export.export(module, (ids,), dynamic_shapes=shapes)
    if decompose:
        program = program.run_decompositions()
    torch.export.save(program, tmp_path / "model.pt2", extra_files={"note.txt": "any text"})
    read = load(tmp_path / "model.pt2").program
    assert read is not None
    torch.testing.assert_close(read.module()(ids), module(ids))


@pytest.mark.parametrize(
    "target",
    """
    torch.load torch.save torch.hub.load torch.os.system torch.compile torch.classes.load_library
    torch.ops.load_library torch.ops.aten.from_file.default torch.ops.aten.from_file.out
    torch.ops.aten.save.default torch.ops.aten.set_.source_Storage torch.ops.aten.resize_.default
    torch.ops.aten.add.out torch.ops.aten.add torch.ops.aten.add.Tensor.__call__
    torch.ops.aten.add.__class__ torch.ops.aten.__class__.__init__ torch.ops.aten.warn.default
    torch.ops.aten._print.default torch.ops.aten.linalg_inv.out torch.ops.aten.fft_fft.out
    torch.ops.aten._sparse_coo_tensor_unsafe.default torch.ops.aten.manual_seed.default
    torch.ops.aten.fbgemm_pack_quantized_matrix.default torch.ops.aten.absent.default
    torch.ops.prims.copy_to.default torch.ops.prim.Print.default
    torch.ops.inductor.resize_storage_bytes_.default
    torch.ops.quantized.linear_unpack.default torch.ops.mkldnn._convolution_pointwise.default
    torch.ops.profiler._record_function_enter_new.default torch.ops.c10d.barrier.default
    torch.ops.rngprims.philox_rand.default torch.ops.aftexport.absent.default
    torch.ops.higher_order.call_torchbind torch.ops.higher_order.triton_kernel_wrapper_mutation
    torch.ops.higher_order.print torch.ops.higher_order.with_effects
    torch._C._jit_set_profiling_mode
    torchvision.io.write_file torch2.os.system torch.aten.add.Tensor
    _operator.methodcaller _operator.attrgetter _operator.call _operator.setitem _operator.pow
    _operator.lshift _operator_.add operator.add math.factorial math.pow math.__loader__
    builtins.exec builtins.open os.system print #aten:add
    """.split(),  # noqa: SIM905
)
def test_unlisted_target_is_refused(target: str) -> None:
    assert not is_allowed(target)


@pytest.mark.parametrize(
    "target",
    """
    torch.ops.aten.add.Tensor torch.ops.aten.add_.Tensor torch.ops.aten.masked_fill_.Scalar
    torch.ops.aten.copy_.default torch.ops.aten.__iand__.Tensor torch.ops.aten.sym_size.int
    torch.ops.aten.batch_norm.default torch.ops.aten.linalg_vector_norm.default
    torch.ops.aten.scaled_dot_product_attention.default torch.ops.aten.special_expit.default
    torch.ops.aten._native_batch_norm_legit_no_training.default torch.ops.aten.index_put_.default
    torch.ops.aftexport.aft_simple.default torch.ops.higher_order.cond torch.sym_max
    torch.ops.higher_order.wrap_with_autocast _operator.floordiv math.trunc
    """.split(),  # noqa: SIM905
)
def test_a_listed_target_is_allowed(target: str) -> None:
    assert is_allowed(target)
