"""Models with several outputs, each with its head, from the export to the server's files."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import several_heads
import torch
from commands import assert_refused, run_here
from rich.console import Console

from aftexport.bundle.bundle import CHUNKED, PARITY, PARITY_PAGE, Bundle
from aftexport.chunked.runner import ChunkedModel
from aftexport.deploy.triton import write_repository
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.errors import UsageError
from aftexport.heads import HEADS
from aftexport.options import ModelSource
from aftexport.pipeline.export import export
from aftexport.pipeline.head_choice import HeadOptions, choose_heads
from aftexport.system.contract import EVIDENCE
from aftexport.verify.check import Request, check

FACTORY = "several_heads:Documents"
NAMES = [*several_heads.TASKS]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    out = tmp_path_factory.mktemp("several") / "model.bundle"
    return export(factory=FACTORY, out=out, task=several_heads.TASKS)


def test_each_output_has_its_head(bundle: Bundle) -> None:
    manifest = bundle.manifest
    assert {name: head.task for name, head in manifest.heads.items()} == several_heads.TASKS
    assert {name: head.width for name, head in manifest.heads.items()} == several_heads.WIDTHS
    outputs = onnx.load(bundle.model_path).graph.output
    assert [output.name for output in outputs] == [*NAMES, EVIDENCE]
    assert Bundle.open(bundle.path).manifest == manifest


def test_every_output_is_that_of_pytorch(bundle: Bundle) -> None:
    model = several_heads.Documents().eval().double()
    engine = OnnxRuntimeEngine(bundle.model_path)
    cases = [case for case in bundle.golden() if case.subject == "model"]
    assert len(cases) > 6
    for case in cases:
        with torch.no_grad():
            inputs = [torch.from_numpy(case.inputs[name]) for name in ("input_ids", "lengths")]
            expected = model(*inputs)
        outputs = engine.run(case.inputs)
        for name in NAMES:
            np.testing.assert_allclose(case.outputs[name], expected[name], rtol=0, atol=1e-12)
            np.testing.assert_allclose(outputs[name], expected[name], rtol=0, atol=1e-4)


def test_comparison_exists_for_each_output(bundle: Bundle) -> None:
    cases = json.loads((bundle.path / PARITY).read_text("utf-8"))["cases"]
    for subject in ("model", "model in chunks", "model in a stock session"):
        ours = [case for case in cases if case["subject"] == subject]
        assert {case["output"] for case in ours} == set(NAMES), subject
        assert all(case["score_error"] < 1e-4 for case in ours)
    assert {case["output"] for case in cases if case["subject"] == "evidence"} == set(NAMES)
    page = (bundle.path / PARITY_PAGE).read_text("utf-8")
    for name in NAMES:
        assert f"<td>{name}</td>" in page
    assert "flags: sigmoid for each of independent labels" in page


def test_chunks_have_every_output(bundle: Bundle) -> None:
    plan = bundle.manifest.chunked
    assert plan is not None
    model = ChunkedModel(bundle.path / CHUNKED, plan, chunk_tokens=64)
    ids = np.arange(500) % several_heads.VOCABULARY
    outputs = model.run(ids, evidence=True)
    whole = OnnxRuntimeEngine(bundle.model_path).run(
        {"input_ids": ids[None], "lengths": np.array([500])}
    )
    assert outputs.keys() == {*NAMES, EVIDENCE}
    for name in (*NAMES, EVIDENCE):
        np.testing.assert_allclose(outputs[name], whole[name], atol=1e-5)


def test_verify_checks_every_output(bundle: Bundle) -> None:
    request = Request(source=ModelSource(factory=FACTORY), lengths=[40], search=4, layers=True)
    report = check(bundle, request, Console(quiet=True))
    assert report.passed, report.reason
    compared = {(c.case, c.output) for c in report.comparisons if c.subject == "model"}
    assert {("40 random tokens", name) for name in NAMES} <= compared
    assert report.layers is not None
    assert {layer.tensor for layer in report.layers.layers} >= set(NAMES)


def test_changed_head_fails_verification(bundle: Bundle, tmp_path: Path) -> None:
    """A fault in one head only is found, and blamed on that head."""
    from aftexport.verify.layer_comparison import compare_layers
    from aftexport.verify.torch_program import Program

    model = onnx.load(bundle.model_path)
    (weight,) = (t for t in model.graph.initializer if t.name == "heads.flags.weight")
    changed = onnx.numpy_helper.to_array(weight) + np.float32(0.1)
    weight.CopyFrom(onnx.numpy_helper.from_array(changed, weight.name))
    onnx.save(model, tmp_path / "model.onnx")
    case = next(case for case in bundle.golden() if case.name == "padded batch")
    program = Program.captured(several_heads.Documents().eval(), torch.float32)
    layers = compare_layers(tmp_path / "model.onnx", program, case, bound=1e-4)
    assert [layer.tensor for layer in layers.layers if layer.outside] == ["flags"]
    assert layers.blame is not None
    assert layers.blame.modules == ("heads.flags",)
    assert "heads.flags.weight" in " ".join(layers.blame.findings)


def test_names_may_be_those_of_operators(tmp_path: Path) -> None:
    bundle = export(factory="several_heads:Named", out=tmp_path / "b", check_parity=False)
    assert [*bundle.manifest.heads] == ["embedding", "linear"]
    engine = OnnxRuntimeEngine(bundle.model_path)
    case = bundle.golden()[0]
    for name, output in engine.run(case.inputs).items():
        if name != EVIDENCE:
            np.testing.assert_allclose(output, case.outputs[name], atol=1e-4)


def test_triton_labels_each_output(bundle: Bundle, tmp_path: Path) -> None:
    folder = write_repository(bundle, tmp_path, name="several", console=Console(quiet=True))
    config = (folder / "config.pbtxt").read_text("utf-8")
    for name, head in bundle.manifest.heads.items():
        assert f'label_filename: "{name}.labels.txt"' in config
        lines = (folder / f"{name}.labels.txt").read_text("utf-8").splitlines()
        assert tuple(lines) == head.logit_names


def test_command_takes_task_of_each_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--factory", FACTORY, "--to", "onnx", "--no-verify", "--out", tmp_path / "b"]
    undeclared = run_here([*words, "--task", "topic=single_label_classification"], capsys)
    assert_refused(undeclared, "the output 'age' with 1 logit", "--task age=regression")
    assert_refused(run_here([*words, "--task", "regression"], capsys), "each of the outputs")
    assert_refused(run_here([*words, "--labels", "a,b"], capsys), "--labels needs a model with one")
    assert_refused(run_here([*words, "--task", "size=regression"], capsys), "got size")
    twice = ["--task", "age=regression", "--task", "age=regression"]
    assert_refused(run_here([*words, *twice], capsys), "once for each name")
    assert not list(tmp_path.iterdir())
    tasks = [
        word for name, task in several_heads.TASKS.items() for word in ("--task", f"{name}={task}")
    ]
    outcome = run_here([*words, *tasks], capsys)
    assert outcome.code == 0, outcome.err
    shown = run_here(["inspect", tmp_path / "b"], capsys)
    assert "task of flags" in shown.out


def test_head_file_describes_every_output(tmp_path: Path) -> None:
    outputs = {"b": np.zeros((1, 2)), "a": np.zeros((1, 1))}
    heads = {"a": HEADS["regression"].of_width(1, ["mass"]),
             "b": HEADS["multi_label_classification"].of_width(2, ["x", "y"])}  # fmt: skip
    file = tmp_path / "heads.json"
    file.write_text(json.dumps({name: head.model_dump() for name, head in heads.items()}))
    chosen = choose_heads(outputs, HeadOptions(head_file=file))
    assert (list(chosen), chosen) == (["b", "a"], heads)
    with pytest.raises(UsageError, match="each of the outputs 'b', 'a', 'c', got 'a', 'b'"):
        choose_heads(outputs | {"c": np.zeros((1, 1))}, HeadOptions(head_file=file))
    tokens = outputs | {"a": np.zeros((1, 5, 1))}
    with pytest.raises(UsageError, match="answers for every token, got regression"):
        choose_heads(tokens, HeadOptions(head_file=file))


def test_task_of_file_needs_one_output() -> None:
    outputs = {"a": np.zeros((1, 2)), "b": np.zeros((1, 2))}
    options = HeadOptions(own_task="multi_label_classification", own_labels=["x", "y"])
    with pytest.raises(UsageError, match="multi_label_classification from the model file"):
        choose_heads(outputs, options)
    (head,) = choose_heads({"a": outputs["a"]}, options).values()
    assert (head.task, head.names) == ("multi_label_classification", ("x", "y"))
