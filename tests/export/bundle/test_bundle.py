import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import safetensors.numpy
from bundles import (
    BAD_MANIFESTS,
    LINKS,
    SPARSE_MANIFESTS,
    changed_manifest,
    of_links,
    resealed,
)
from commands import assert_refused, listing, run_here
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from memory import NEEDS_PROC

from aftexport.bundle.bundle import GOLDEN, PARITY, Bundle, is_bundle, write_manifest
from aftexport.engines.onnxruntime import OnnxRuntimeEngine, operator_paths
from aftexport.errors import AftexportError, BundleError, EngineError, UsageError
from aftexport.onnx_io import MODEL, MODEL_DATA, read_model, write_model
from aftexport.parity.run_cases import verify
from aftexport.system.files import write_json
from aftexport.verify.search import token_norms


def test_bundle_holds_documented_files(bundle_folder: Path) -> None:
    assert {path.name for path in bundle_folder.iterdir()} == {
        "manifest.json", "model.onnx", "chunked.zip", "tokenizer.json", "golden.safetensors",
        "parity.json", "parity.html",
    }  # fmt: skip
    bundle = Bundle.open(bundle_folder)
    assert bundle.manifest.hardware == "any"
    assert bundle.manifest.config is not None
    assert bundle.manifest.config["mechanism"] == "aft_simple"
    assert bundle.tokenizer() is not None
    assert set(bundle.files) == {p.name for p in bundle_folder.iterdir()} - {"manifest.json"}


def test_parity_json_describes_comparison(bundle_folder: Path) -> None:
    record = json.loads((bundle_folder / PARITY).read_text("utf-8"))
    assert record["checked"] is True
    assert all(case["passed"] and case["error"] <= case["bound"] for case in record["cases"])
    shapes = [case["shape"] for case in record["cases"] if case["subject"] == "model"]
    assert [1, 1] in shapes
    assert max(tokens for _, tokens in shapes) >= 4096
    assert max(batch for batch, _ in shapes) >= 3


def put(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def flip(name: str) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 2] ^= 1
        (folder / name).write_bytes(content)

    return damage


def linked(name: str, target: str | Path) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(target)

    return damage


def linked_to_another(folder: Path) -> None:
    other = folder.parent / "other.onnx"
    other.write_bytes((folder / MODEL).read_bytes()[:-1] + b"!")
    linked(MODEL, other)(folder)


def unlisted(name: str) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        files = json.loads((folder / "manifest.json").read_text("utf-8"))["files"]
        del files[name]
        changed_manifest(folder, {"files": files})

    return damage


def listed(name: str) -> Callable[[Path], object]:
    entry = {"bytes": 4, "sha256": "0" * 64}
    return lambda folder: changed_manifest(folder, {"files": {name: entry}})


def golden(tensors: dict[str, np.ndarray]) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        (folder / GOLDEN).write_bytes(safetensors.numpy.save(tensors))
        resealed(folder)

    return damage


def resealed_with(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (put(name, content)(folder), resealed(folder))


IDS, LENGTHS = np.zeros((1, 2), np.int64), np.array([2])
LOGITS = np.zeros((1, 3))

DAMAGE: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "model missing": (lambda folder: (folder / MODEL).unlink(), ("model.onnx is missing",)),
    "golden missing": (lambda folder: (folder / GOLDEN).unlink(), ("golden.safetensors is",)),
    "tokenizer missing": (
        lambda folder: (folder / "tokenizer.json").unlink(), ("tokenizer.json is missing",)),
    "model changed": (flip(MODEL), ("model.onnx was changed",)),
    "golden changed": (flip(GOLDEN), ("golden.safetensors was changed",)),
    "parity changed": (flip(PARITY), ("parity.json was changed",)),
    "model not fetched": (
        put(MODEL, b"version https://git-lfs.github.com/spec/v1\n"), ("pointer", "git lfs pull")),
    "model cut": (put(MODEL, b"short"), ("model.onnx must have", "got 5")),
    "model linked to another": (linked_to_another, ("model.onnx was changed",)),
    "model linked to nothing": (
        linked(MODEL, "../blobs/12"), ("model.onnx is a link to ../blobs/12, where", "cp -rL")),
    "model linked to itself": (linked(MODEL, MODEL), ("model.onnx is a link to model.onnx",)),
    "model linked to a folder": (linked(MODEL, ".."), ("model.onnx is not a file",)),
    "model linked to a device": (linked(MODEL, "/dev/zero"), ("model.onnx is not a file",)),
    "manifest linked to nothing": (
        linked("manifest.json", "../blobs/34"), ("manifest.json is a link to ../blobs/34",)),
    "manifest linked to a folder": (linked("manifest.json", ".."), ("manifest.json is not a",)),
    "manifest linked to a device": (
        linked("manifest.json", "/dev/zero"), ("manifest.json is not a file",)),
    "manifest of too many bytes": (
        lambda folder: os.truncate(folder / "manifest.json", 67108865), ("got 67108865",)),
    "model unlisted": (unlisted(MODEL), ("model.onnx",)),
    "golden unlisted": (unlisted(GOLDEN), ("golden.safetensors",)),
    "path upwards": (listed("../secret"), ("../secret",)),
    "path absolute": (listed("/etc/passwd"), ("/etc/passwd",)),
    "path dots": (listed(".."), ("..",)),
    "path in a folder": (listed("a/b"), ("a/b",)),
    "path backslash": (listed("..\\b"), ("b",)),
    "path in markup": (listed("[/b]"), ("[/b]",)),
    "path too long": (listed("a" * 300), ("aaa cannot be read (File name too long)",)),
    "manifest empty": (put("manifest.json", b""), ("manifest.json",)),
    "manifest cut": (put("manifest.json", b'{"schema_version": 1,'), ("manifest.json",)),
    "manifest a list": (put("manifest.json", b"[]"), ("manifest.json",)),
    "manifest no Unicode": (put("manifest.json", b"\xff\xfe"), ("manifest.json",)),
    "manifest nested": (put("manifest.json", b"[" * 100_000), ("manifest.json",)),
    "newer schema": (
        lambda folder: changed_manifest(folder, {"schema_version": 2}), ("got 2", "Upgrade")),
    "newer operators": (
        lambda folder: changed_manifest(folder, {"operator_version": 2}), ("2", "Upgrade")),
    "model no ONNX": (resealed_with(MODEL, b"junk" * 9), ()),
    "model empty": (resealed_with(MODEL, b""), ()),
    "chunks no archive": (resealed_with("chunked.zip", b"junk" * 9), ("chunked.zip",)),
    "chunks of nothing": (
        resealed_with("chunked.zip", b"PK\5\6" + bytes(18)), ("chunked.zip", "chunked.stages")),
    "tokenizer no JSON": (resealed_with("tokenizer.json", b"{"), ("tokenizer",)),
    "tokenizer no Unicode": (resealed_with("tokenizer.json", b"\xff\xfe"), ("tokenizer",)),
    "golden no safetensors": (resealed_with(GOLDEN, b"junk" * 9), ("golden.safetensors",)),
    "golden without a case": (golden({}), ("golden.safetensors",)),
    "golden of other names": (golden({"x": IDS}), ("golden.safetensors",)),
    "golden without outputs": (golden({"model/a/input/input_ids": IDS}), ("model/a",)),
    "golden without inputs": (golden({"model/a/expected": LOGITS}), ("model/a",)),
    "golden without ids": (
        golden({"model/a/input/lengths": LENGTHS, "model/a/expected": LOGITS}), ()),
    "golden of an operator the model lacks": (
        golden({"model/a/input/input_ids": IDS, "model/a/input/lengths": LENGTHS,
                "model/a/expected": LOGITS,
                "AftFull/a/input/query": LOGITS, "AftFull/a/expected": LOGITS}), ("AftFull",)),
    "golden of an operator alone": (
        golden({"AftSimple/a/input/query": LOGITS, "AftSimple/a/expected": LOGITS}),
        ("no cases of the model",)),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_bundle_error_names_reason(
    kind: str, bundle_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, reasons = DAMAGE[kind]
    damage(bundle_copy)
    before = listing(bundle_copy.parent)
    outcome = run_here(["verify", bundle_copy], capsys)
    if "tokenizer no" in kind:  # of no concern to verify
        with pytest.raises(BundleError, match="tokenizer"):
            Bundle.open(bundle_copy).tokenizer()
    else:
        assert_refused(outcome, *reasons)
    inspected = run_here(["inspect", bundle_copy], capsys)
    assert inspected.code in (0, 2)
    if "link" in kind:
        assert_refused(inspected, *reasons)
    assert listing(bundle_copy.parent) == before


@pytest.mark.parametrize("kind", BAD_MANIFESTS)
def test_manifest_of_wrong_values_is_refused(
    kind: str, bundle_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed_manifest(bundle_copy, BAD_MANIFESTS[kind])
    outcomes = [run_here([command, bundle_copy], capsys) for command in ("verify", "inspect")]
    assert all("Traceback" not in outcome.err for outcome in outcomes)
    refused = [outcome for outcome in outcomes if outcome.code == 2]
    assert refused, "neither verify nor inspect minds"
    for outcome in refused:
        assert_refused(outcome, "copy.bundle")


@pytest.mark.parametrize("kind", SPARSE_MANIFESTS)
def test_manifest_with_few_fields_is_shown(
    kind: str, bundle_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed_manifest(bundle_copy, SPARSE_MANIFESTS[kind])
    shown = run_here(["inspect", bundle_copy], capsys)
    assert shown.code == 0, shown.err
    assert all(name in shown.out for name in SPARSE_MANIFESTS[kind].get("labels", []))


def test_bundle_texts_move_no_cursor(bundle_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed_manifest(bundle_copy, {"labels": ["\x1b[31ma", "\x9b2Jb", "c\r"]})
    shown = run_here(["inspect", bundle_copy], capsys)
    assert all(label in shown.out for label in (r"\x1b[31ma", r"\x9b2Jb", r"c\r"))
    model = onnx.load(bundle_copy / MODEL)
    model.graph.input[0].name = "\x1b]0;title\x07"
    (bundle_copy / MODEL).write_bytes(model.SerializeToString())
    refused = run_here(["inspect", resealed(bundle_copy)], capsys)
    assert_refused(refused, r"\x1b]0;title\x07")
    said = shown.out + shown.err + refused.out + refused.err
    assert not re.search(r"[^\n -~\xa0-\U0010ffff]", said)


@pytest.mark.parametrize("damage", ["absent", "a file", "an empty folder"])
def test_folder_without_bundle_is_refused(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if damage == "a file":
        (tmp_path / damage).write_text("text")
    elif damage != "absent":
        (tmp_path / damage).mkdir()
    before = listing(tmp_path)
    assert_refused(run_here(["verify", tmp_path / damage], capsys), damage)
    assert listing(tmp_path) == before
    assert not is_bundle(tmp_path / damage)


entries = st.sampled_from(sorted(BAD_MANIFESTS["unknown entry"] | {
    name: None for changes in BAD_MANIFESTS.values() for name in changes
}))  # fmt: skip
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
)


@given(name=entries, value=values)
@settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_manifest_values_give_no_traceback(
    name: str, value: object, bundle_folder: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "property"
    if not copy.exists():
        shutil.copytree(bundle_folder, copy)
    content = json.loads((bundle_folder / "manifest.json").read_text("utf-8"))
    (copy / "manifest.json").write_text(json.dumps(content | {name: value}), "utf-8")
    try:
        bundle = Bundle.open(copy)
    except BundleError:
        pass
    else:
        manifest = bundle.manifest
        assert manifest.vocab_size > 0
        assert all(isinstance(label, str) for label in manifest.labels)
        assert all(isinstance(name, str) for name in manifest.inputs)


@pytest.fixture(scope="module")
def outside_bundle(bundle_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a bundle with external weights, as weights over the protobuf limit need."""
    folder = tmp_path_factory.mktemp("outside") / "bundle"
    shutil.copytree(bundle_folder, folder)
    (folder / MODEL).unlink()
    (folder / "manifest.json").unlink()
    write_model(folder, onnx.load(bundle_folder / MODEL), max_bytes=10_000)
    write_manifest(folder, Bundle.open(bundle_folder).manifest)
    return folder


def test_large_weights_go_to_own_file(outside_bundle: Path) -> None:
    bundle = Bundle.open(outside_bundle)
    assert bundle.files[MODEL_DATA] > bundle.files[MODEL]
    assert all(result.passed for result in verify(bundle))
    assert operator_paths(bundle.model_path).keys() == bundle.manifest.operators.keys()


@pytest.mark.parametrize("name", [".", "manifest.json", MODEL])
def test_unreadable_bundle_is_refused(name: str, bundle_copy: Path) -> None:
    user = os.geteuid()
    (bundle_copy / name).chmod(0)
    if user == 0:  # who may read everything
        os.seteuid(65534)
    try:
        with pytest.raises(BundleError, match=r"cannot be read \(Permission denied\)") as refused:
            Bundle.open(bundle_copy)
    finally:
        os.seteuid(user)
        (bundle_copy / name).chmod(0o700)
    assert "permissions" in refused.value.remedy


def test_external_weights_are_checked(outside_bundle: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(outside_bundle, tmp_path / "copy"))
    flip(MODEL_DATA)(copy)
    with pytest.raises(BundleError, match=r"model\.onnx\.data was changed"):
        Bundle.open(copy)
    (copy / MODEL_DATA).unlink()
    with pytest.raises(BundleError, match=r"model\.onnx\.data is missing"):
        Bundle.open(copy)


@pytest.mark.parametrize("kind", LINKS)
def test_links_are_read_as_files(
    kind: str, outside_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights in a file of their own too, which the onnx package reads through no link."""
    folder = of_links(outside_bundle, kind, tmp_path)
    before = listing(tmp_path)
    bundle = Bundle.open(folder)
    assert bundle.digest == Bundle.open(outside_bundle).digest
    cases = [case for case in bundle.golden() if case.name == "seven tokens"]
    assert all(result.passed for result in verify(bundle, cases=cases))
    expected, found = (read_model(path / MODEL) for path in (outside_bundle, folder))
    assert found.SerializeToString() == expected.SerializeToString()
    assert token_norms(bundle.model_path) is not None
    assert run_here(["inspect", folder], capsys).code == 0
    assert listing(tmp_path) == before


@pytest.mark.parametrize("name", [MODEL, PARITY])
def test_report_through_link_is_refused(
    name: str, bundle_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A report is not written over the file that a link leads to."""
    folder = of_links(bundle_folder, "cache", tmp_path)
    before = listing(tmp_path)
    for place in (folder / name, (folder / name).resolve()):
        for option in ("--json", "--report"):
            assert_refused(run_here(["verify", folder, option, place], capsys), option)
    assert listing(tmp_path) == before


@pytest.mark.parametrize("name", [MODEL, MODEL_DATA])
def test_link_beside_a_file_is_read(name: str, outside_bundle: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(outside_bundle, tmp_path / "copy"))
    (tmp_path / "elsewhere").mkdir()
    target = Path(shutil.move(copy / name, tmp_path / "elsewhere" / "blob"))
    (copy / name).symlink_to(target)
    bundle = Bundle.open(copy)
    engine = OnnxRuntimeEngine(bundle.model_path, threads=1)
    (case,) = [case for case in bundle.golden() if case.name == "seven tokens"]
    np.testing.assert_allclose(engine.run(case.inputs)["logits"], case.expected, atol=1e-4)


def test_model_in_memory_reads_no_file(
    outside_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph of chunked.zip brings its weights, so it reads no file of the current folder."""
    monkeypatch.chdir(outside_bundle)
    with pytest.raises(EngineError, match=r"model\.onnx\.data"):
        OnnxRuntimeEngine((outside_bundle / MODEL).read_bytes())


def test_weights_of_no_digest_are_refused(outside_bundle: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(outside_bundle, tmp_path / "copy"))
    unlisted(MODEL_DATA)(copy)
    with pytest.raises(BundleError, match=r"model\.onnx reads 'model\.onnx\.data', which"):
        Bundle.open(copy)


def test_weights_outside_bundle_are_refused(outside_bundle: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(outside_bundle, tmp_path / "copy"))
    shutil.move(copy / MODEL_DATA, tmp_path / "outside.data")
    model = onnx.load(copy / MODEL, load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = os.path.join("..", "outside.data")  # noqa: PTH118
    (copy / MODEL).write_bytes(model.SerializeToString())
    with pytest.raises(AftexportError):
        OnnxRuntimeEngine(Bundle.open(resealed(copy)).model_path)


def test_source_file_is_known_by_content(
    bundle_folder: Path, checkpoint_file: Path, tmp_path: Path
) -> None:
    bundle = Bundle.open(bundle_folder)
    same = tmp_path / "same.pt"
    same.write_bytes(checkpoint_file.read_bytes())
    bundle.check_source(same)
    other = tmp_path / "other.pt"
    other.write_bytes(checkpoint_file.read_bytes() + b"\0")
    with pytest.raises(UsageError, match=r"got .*other\.pt"):
        bundle.check_source(other)


@NEEDS_PROC
def test_unreadable_source_is_refused(bundle_folder: Path) -> None:
    with pytest.raises(UsageError, match="/proc/self/mem cannot be read"):
        Bundle.open(bundle_folder).check_source(Path("/proc/self/mem"))


def test_json_ignores_order_of_entries(tmp_path: Path) -> None:
    write_json(tmp_path / "a", {"b": np.float64(1.5), "a": "é"})
    write_json(tmp_path / "b", {"a": "é", "b": 1.5})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
