import io
import json
import pickle
import re
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from archives import Members, graph, rewritten
from bad_models import MARKER, Hostile
from commands import assert_refused, listing, run_here
from torch.export import Dim

from aftexport.bundle.bundle import Bundle
from aftexport.capture.input_spec import input_spec
from aftexport.checkpoint import load
from aftexport.errors import CheckpointError, EngineError, TraceError
from aftexport.pipeline.export import export

SPY = "spy_module"


def member(ending: str, content: bytes) -> Callable[..., Members]:
    return lambda members: [(n, content if n.endswith(ending) else c) for n, c in members]


def added(name: str) -> Callable[..., Members]:
    return lambda members: [*members, (f"model/{name}", b"junk")]


def expression(text: str) -> Callable[[dict[str, Any]], None]:
    def change(item: Any) -> None:
        if isinstance(item, dict):
            if "expr_str" in item:
                item["expr_str"] = text
            for value in item.values():
                change(value)
        elif isinstance(item, list):
            for value in item:
                change(value)

    return change


def structure(kind: str, context: Any) -> Callable[[dict[str, Any]], None]:
    """Return an input structure whose reading imports a module of the file's choice."""

    def change(content: dict[str, Any]) -> None:
        signature = content["graph_module"]["module_call_graph"][0]["signature"]
        spec = {"type": kind, "context": context, "children_spec": []}
        signature["in_spec"] = json.dumps([1, spec])

    return change


def weights_as_pickles(hostile: bytes) -> Callable[..., Members]:
    def apply(members: Members) -> Members:
        result = []
        for name, content in members:
            if name.endswith("weights_config.json"):
                settings = json.loads(content)
                for entry in settings["config"].values():
                    entry["use_pickle"] = True
                content = json.dumps(settings).encode()
            elif "/weights/weight_" in name:
                content = hostile
            result.append((name, content))
        return result

    return apply


def saved_by_torch(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def hostile_archives(folder: Path) -> dict[str, Callable[..., Members]]:
    marker = str(folder / MARKER)
    code = f"__import__('os').mkdir({marker!r})"
    factory = {"default_factory_module": SPY, "default_factory_name": "Spy", "dict_context": []}
    enum = json.dumps({"__enum__": True, "fqn": f"{SPY}:Spy", "name": "x"})
    return {
        "shape expression is code": graph(expression(code)),
        "code behind a good model.json": graph(expression(code), keep="changed good"),
        "code before a good model.json": graph(expression(code), keep="good changed"),
        "expression that takes for ever to check": graph(expression("1" * 64 + "!")),
        "guard is code": graph(lambda content: content.update(guards_code=[f"{code} or True"])),
        "input structure imports a module": graph(structure("collections.defaultdict", factory)),
        "input structure names an enum": graph(structure("builtins.tuple", enum)),
        "sample inputs unpickle": member("sample_inputs/model.pt", saved_by_torch(Hostile(folder))),
        "sample inputs, raw pickle": member(
            "sample_inputs/model.pt", pickle.dumps(Hostile(folder))
        ),
        "weights unpickle": weights_as_pickles(saved_by_torch(Hostile(folder))),
        "constant unpickles": added("data/constants/custom_obj_0"),
        "compiled code": added("data/aotinductor/model/model.so"),
        "model.json no JSON": member("models/model.json", b"{"),
        "model.json nested": member("models/model.json", b"[" * 100_000),
        "model.json empty": member("models/model.json", b"{}"),
        "no model": lambda members: [m for m in members if not m[0].endswith("model.json")],
        "no weights": lambda members: [m for m in members if "/weights/" not in m[0]],
        "weight cut": member("weights/weight_0", b"\0\0"),
    }


@pytest.mark.parametrize("kind", hostile_archives(Path()))
def test_bad_archive_is_refused_without_running(
    kind: str,
    program_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / f"{SPY}.py").write_text(
        f"import os\nos.mkdir({str(tmp_path / MARKER)!r})\nclass Spy: pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    model = rewritten(program_file, tmp_path, hostile_archives(tmp_path)[kind])
    before = listing(tmp_path)
    outcome = run_here([model, "--to", "onnx"], capsys)
    sys.modules.pop(SPY, None)
    assert listing(tmp_path) == before
    assert_refused(outcome, "model.pt2")
    assert "weights_only" not in outcome.err


def test_endless_power_is_refused_before_torch(
    program_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power that would never end is refused before torch sees it."""

    def reached(path: Path) -> None:
        raise AssertionError("torch.export.load was reached")

    monkeypatch.setattr(torch.export, "load", reached)
    model = rewritten(program_file, tmp_path, graph(expression("9**9**9**9")))
    with pytest.raises(CheckpointError, match="expression") as refusal:
        load(model)
    assert "reached" not in str(refusal.value)


@pytest.mark.parametrize("position", [0.01, 0.3, 0.6, 0.95, 0.999])
def test_an_archive_cut_short_is_refused(
    position: float, program_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = program_file.read_bytes()
    (tmp_path / "model.pt2").write_bytes(content[: int(len(content) * position)])
    before = listing(tmp_path)
    assert_refused(run_here([tmp_path / "model.pt2", "--to", "onnx"], capsys), "model.pt2")
    assert listing(tmp_path) == before


def test_damaged_archive_is_refused(program_file: Path, tmp_path: Path) -> None:
    content = bytearray(program_file.read_bytes())
    with zipfile.ZipFile(program_file) as archive:
        weight = archive.read("model/data/weights/weight_0")
    content[content.index(weight) + 64] ^= 1
    (tmp_path / "model.pt2").write_bytes(content)
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path / "model.pt2"))):
        load(tmp_path / "model.pt2")


def test_compressed_archive_is_refused(program_file: Path, tmp_path: Path) -> None:
    """Its members would expand to more bytes than the file has."""
    path = tmp_path / "model.pt2"
    with zipfile.ZipFile(program_file) as archive, zipfile.ZipFile(path, "w") as copy:
        for name in archive.namelist():
            padding = b" " * (64 << 20) if name.endswith("models/model.json") else b""
            copy.writestr(name, archive.read(name) + padding, zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match="is compressed"):
        load(path)


def test_program_with_dynamic_shapes_becomes_bundle(
    program_file: Path, bundle_folder: Path, tmp_path: Path
) -> None:
    """The program also holds our operators."""
    bundle = export(program_file, out=tmp_path / "out")
    module = Bundle.open(bundle_folder).manifest
    assert bundle.manifest.source["kind"] == "torch.export program"
    assert bundle.manifest.operators == module.operators
    assert bundle.manifest.heads["logits"].names == ("class_0", "class_1", "class_2")
    assert (bundle.manifest.inputs, bundle.manifest.vocab_size, bundle.manifest.max_tokens) == (
        module.inputs, module.vocab_size, module.max_tokens
    )  # fmt: skip


def program_of(path: Path, batch: Any, tokens: Any) -> Path:
    shapes = {"input_ids": {0: batch, 1: tokens}}
    ids = torch.zeros((2, 16), dtype=torch.int64)
    torch.export.save(torch.export.export(tiny_models.Bag(), (ids,), dynamic_shapes=shapes), path)
    return path


@pytest.mark.parametrize(
    ("batch", "tokens", "fixed"),
    [(None, None, "batch"), (Dim("batch"), None, "tokens"), (None, Dim("tokens"), "batch")],
)
def test_program_with_fixed_axis_is_refused(
    batch: Any, tokens: Any, fixed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = program_of(tmp_path / "model.pt2", batch, tokens)
    before = listing(tmp_path)
    outcome = run_here([model, "--to", "onnx"], capsys)
    assert_refused(outcome, f"{fixed} fixed at", "dynamic_shapes")
    assert listing(tmp_path) == before


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [
        (Dim("batch"), Dim("tokens")),
        (Dim.DYNAMIC, Dim.DYNAMIC),
        (Dim("batch", min=1, max=8), Dim("tokens", min=2, max=64)),
        (Dim("batch", min=2, max=3), Dim("tokens", min=1, max=64)),
    ],
    ids=["unbounded", "unnamed", "two tokens or more", "two or three documents"],
)
def test_program_bounds_are_kept_or_refused(batch: Any, tokens: Any, tmp_path: Path) -> None:
    model = program_of(tmp_path / "model.pt2", batch, tokens)
    try:
        bundle = export(model, out=tmp_path / "out")
    except (TraceError, EngineError):
        assert listing(tmp_path).keys() == {"model.pt2"}
    else:
        assert bundle.manifest.max_tokens in (None, 64)


def test_program_bound_is_read(tmp_path: Path) -> None:
    path = program_of(tmp_path / "model.pt2", Dim("batch", max=9), Dim("tokens", min=1, max=77))
    program = load(path).program
    assert program is not None
    assert input_spec(program).max_tokens == 77


@pytest.mark.parametrize(
    ("option", "named"),
    [
        (["--precision", "fp16"], "--precision"),
        (["--max-length", "8"], "--max-length"),
        (["--factory", "tiny_models:Bag"], "tiny_models:Bag"),
    ],
)
def test_unsupported_program_options_are_refused(
    option: list[str],
    named: str,
    program_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [program_file, "--to", "onnx", "--out", tmp_path / "out", *option]
    assert_refused(run_here(words, capsys), ".pt2", named)
    assert not listing(tmp_path)
