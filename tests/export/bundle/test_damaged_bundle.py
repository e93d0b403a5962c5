"""Bundles that are damaged, or whose manifest holds unusual values."""

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
    SPARSE_MANIFESTS,
    changed_manifest,
    classes,
    flip,
    resealed,
    unlisted,
)
from commands import Capture, assert_refused, listing, run_here
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aftexport.bundle.bundle import GOLDEN, PARITY, Bundle, is_bundle
from aftexport.errors import BundleError
from aftexport.system.onnx_files import MODEL


def put(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def linked(name: str, target: str | Path) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(target)

    return damage


def linked_to_another(folder: Path) -> None:
    other = folder.parent / "other.onnx"
    other.write_bytes((folder / MODEL).read_bytes()[:-1] + b"!")
    linked(MODEL, other)(folder)


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
        linked(MODEL, "../blobs/12"), ("model.onnx is a link to ../blobs/12, which", "cp -rL")),
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
        lambda folder: changed_manifest(folder, {"schema_version": 5}), ("got 5", "Upgrade")),
    "earlier schema": (
        lambda folder: changed_manifest(folder, {"schema_version": 3}),
        ("schema_version: expected 4, got 3", "Export the model again")),
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
    "golden without inputs": (golden({"model/a/output/logits": LOGITS}), ("model/a",)),
    "golden without ids": (
        golden({"model/a/input/lengths": LENGTHS, "model/a/output/logits": LOGITS}), ()),
    "golden of an operator the model lacks": (
        golden({"model/a/input/input_ids": IDS, "model/a/input/lengths": LENGTHS,
                "model/a/output/logits": LOGITS,
                "AftFull/a/input/query": LOGITS, "AftFull/a/output/output": LOGITS}), ("AftFull",)),
    "golden of another output": (
        golden({"model/a/input/input_ids": IDS, "model/a/input/lengths": LENGTHS,
                "model/a/output/mood": LOGITS}), ("outputs logits in model/a, got mood",)),
    "golden of an operator without its output": (
        golden({"model/a/input/input_ids": IDS, "model/a/output/logits": LOGITS,
                "AftSimple/a/input/query": LOGITS, "AftSimple/a/output/x": LOGITS}),
        ("AftSimple/a is incomplete",)),
    "golden of an operator alone": (
        golden({"AftSimple/a/input/query": LOGITS, "AftSimple/a/output/output": LOGITS}),
        ("no cases of the model",)),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_bundle_error_names_reason(kind: str, bundle_copy: Path, capsys: Capture) -> None:
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
def test_manifest_of_wrong_values_is_refused(kind: str, bundle_copy: Path, capsys: Capture) -> None:
    changed_manifest(bundle_copy, BAD_MANIFESTS[kind])
    outcomes = [run_here([command, bundle_copy], capsys) for command in ("verify", "inspect")]
    assert all("Traceback" not in outcome.err for outcome in outcomes)
    refused = [outcome for outcome in outcomes if outcome.code == 2]
    assert refused, "neither verify nor inspect minds"
    for outcome in refused:
        assert_refused(outcome, "copy.bundle")


@pytest.mark.parametrize("kind", SPARSE_MANIFESTS)
def test_manifest_with_few_fields_is_shown(kind: str, bundle_copy: Path, capsys: Capture) -> None:
    changed_manifest(bundle_copy, SPARSE_MANIFESTS[kind])
    shown = run_here(["inspect", bundle_copy], capsys)
    assert shown.code == 0, shown.err
    heads = SPARSE_MANIFESTS[kind].get("heads", {})
    assert all(name in shown.out for head in heads.values() for name in head["labels"])


def test_bundle_texts_move_no_cursor(bundle_copy: Path, capsys: Capture) -> None:
    changed_manifest(bundle_copy, classes(["\x1b[31ma", "\x9b2Jb", "c\r"]))
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
def test_folder_without_bundle_is_refused(damage: str, tmp_path: Path, capsys: Capture) -> None:
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
        assert all(isinstance(label, str) for label in manifest.heads["logits"].names)
        assert all(isinstance(name, str) for name in manifest.inputs)


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
