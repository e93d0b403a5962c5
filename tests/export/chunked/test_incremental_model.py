"""A bundle classifies documents that grow, and saves their states."""

import dataclasses
import hashlib
import shutil
import struct
import threading
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import tiny_models
import torch
from calibrations import calibration
from commands import run_python
from rich.console import Console
from token_models import document

import aftexport
from aftexport.bundle.bundle import MANIFEST, Bundle, write_manifest
from aftexport.chunked.document_state import VERSION, DocumentState
from aftexport.chunked.incremental_model import IncrementalModel, append_problem
from aftexport.deploy.inspection import show_bundle
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.errors import InputError, UsageError
from aftexport.extra_inputs import ExtraInput
from aftexport.heads.calibration import Scaling
from aftexport.nn import ClassifierConfig, DocumentClassifier
from aftexport.parity import TOLERANCES
from aftexport.pipeline.export import export

MAX_TOKENS = 300
HEAD_BYTES = 40


def exported(folder: Path, mechanism: str) -> Path:
    torch.manual_seed(3)
    settings = {"mechanism": mechanism, "window": 4, "causal": True, "pooling": "attention"}
    model = DocumentClassifier(ClassifierConfig(**tiny_models.CONFIG | settings))
    aftexport.save(folder / "model.pt", model=model.eval(), labels=tiny_models.LABELS)
    export(folder / "model.pt", out=folder / "model.bundle", max_length=MAX_TOKENS)
    return folder / "model.bundle"


@pytest.fixture(scope="module")
def causal_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(tmp_path_factory.mktemp("causal"), "aft_conv")


@pytest.fixture(scope="module")
def model(causal_bundle: Path) -> IncrementalModel:
    return IncrementalModel(causal_bundle, threads=1)


@pytest.fixture(scope="module")
def state(model: IncrementalModel) -> DocumentState:
    return model.append(None, document(100))[1]


def test_answer_is_that_of_whole_document(model: IncrementalModel, causal_bundle: Path) -> None:
    ids = document(60)
    _, state = model.append(None, ids[:37].tolist())
    answer, state = model.append(state, ids[37:])
    bundle = Bundle.open(causal_bundle)
    whole = OnnxRuntimeEngine(bundle.model_path, threads=1)
    expected = whole.run({"input_ids": ids[None], "lengths": np.array([60])})["logits"][0]
    error = np.abs(answer.outputs["logits"] - expected).max()
    assert error <= TOLERANCES["fp32"].bound
    assert answer.heads["logits"] == model.heads["logits"].answer(answer.outputs["logits"])
    assert state.tokens == 60
    assert state.digest == model.digest(ids)
    assert state.bundle == bundle.digest


def test_answer_is_calibrated_by_length(causal_bundle: Path, tmp_path: Path) -> None:
    """The calibration takes the tokens of the whole document, not those of the last append."""
    folder = Path(shutil.copytree(causal_bundle, tmp_path / "calibrated.bundle"))
    scores = calibration(Scaling(log_temperature=0.5, slope=0.1), method="temperature")
    manifest = Bundle.open(folder).manifest.model_copy(update={"calibration": {"logits": scores}})
    (folder / MANIFEST).unlink()
    write_manifest(folder, manifest)
    model = IncrementalModel(folder, threads=1)
    _, state = model.append(None, document(150))
    answer, _ = model.append(state, [5])
    logits = answer.outputs["logits"]
    expected = scores.scores(model.heads["logits"], logits, 151)
    assert list(answer.heads["logits"].calibrated.values()) == expected.tolist()


def test_saved_state_goes_on(model: IncrementalModel, causal_bundle: Path) -> None:
    for tokens in (1, 2, 3, 200):  # shorter and longer than the window
        _, before = model.append(None, document(tokens))
        content = model.save(before)
        assert len(content) <= model.max_state_bytes
        loaded = IncrementalModel(causal_bundle, threads=1).load(content)
        assert (loaded.tokens, loaded.digest) == (tokens, before.digest)
        assert model.save(loaded) == content
        ours, after = model.append(before, [7, 8])
        theirs, later = model.append(loaded, [7, 8])
        np.testing.assert_array_equal(ours.outputs["logits"], theirs.outputs["logits"])
        assert model.save(after) == model.save(later)


def test_damaged_states_are_refused(model: IncrementalModel, state: DocumentState) -> None:
    content = model.save(state)
    generator = np.random.default_rng(0)
    for place in generator.integers(0, len(content), 200):
        damaged = bytearray(content)
        damaged[place] ^= 1 << int(generator.integers(8))
        with pytest.raises(InputError, match=r"damaged|Expected"):
            model.load(bytes(damaged))
    for size in (0, 7, HEAD_BYTES, len(content) - 1):
        with pytest.raises(InputError, match=r"damaged|Expected"):
            model.load(content[:size])


def resealed(content: bytes) -> bytes:
    """Return changed bytes with their checksum, as an attacker would write them."""
    rest = content[HEAD_BYTES:]
    return content[:8] + hashlib.blake2b(rest, digest_size=32).digest() + rest


def described(content: bytes, old: str, new: str) -> bytes:
    """Return a state with changed metadata of the same length."""
    assert len(old) == len(new)
    assert old.encode() in content
    return resealed(content.replace(old.encode(), new.encode()))


def test_wrong_states_with_checksum_are_refused(
    model: IncrementalModel, state: DocumentState
) -> None:
    content = model.save(state)
    (size,) = struct.unpack_from("<Q", content, HEAD_BYTES)
    header = content[HEAD_BYTES + 8 : HEAD_BYTES + 8 + size].decode()
    text = header.partition('"state":"')[2].partition('}"')[0]
    arrays = safetensors.numpy.load(content[HEAD_BYTES:])

    def with_arrays(changes: dict[str, np.ndarray]) -> bytes:
        meta = {"state": (text + "}").replace("\\", "")}
        rest = safetensors.numpy.save({**arrays, **changes}, meta)
        return resealed(content[:HEAD_BYTES] + rest)

    assert model.load(with_arrays({})).digest == state.digest
    name = next(name for name in arrays if name.startswith("stage.0.keys"))
    row = next(name for name in arrays if name.startswith("stage.0.recent"))
    for wrong in (
        with_arrays({name: arrays[name][:, :, :1]}),
        with_arrays({name: arrays[name].astype(np.float64)}),
        with_arrays({row: np.repeat(arrays[row], 2, 1)}),
        with_arrays({"another": arrays[name]}),
        with_arrays({"digest.chain": np.zeros(31, np.uint8)}),
        with_arrays({"digest.pending": np.zeros(2000, np.uint8)}),
        described(content, '"tokens\\":100', '"tokens\\":101'),
        described(content, '"tokens\\":100', '"tokens\\":-10'),
        described(content, '"tokens\\":100', '"tokens\\":1e9'),
    ):
        with pytest.raises(InputError, match="damaged"):
            model.load(wrong)
    with pytest.raises(InputError, match="must have at most"):
        model.load(content + bytes(model.max_state_bytes))


def test_other_bundle_and_version_are_refused(
    model: IncrementalModel, state: DocumentState
) -> None:
    content = model.save(state)
    other = "0" * 64
    foreign = dataclasses.replace(state, bundle=other)
    with pytest.raises(InputError, match=f"got one of the bundle {other}"):
        model.append(foreign, [1])
    with pytest.raises(InputError, match=f"got one of the bundle {other}"):
        model.load(described(content, state.bundle, other))
    newer = content[:7] + bytes([VERSION + 1]) + content[8:]
    with pytest.raises(InputError, match="got version 2"):
        model.load(newer)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "at least one token, got none"),
        ([300], "from 0 to 299, got 300"),
        ([-1], "from 0 to 299, got -1"),
        ([0.5], "Expected integers"),
        ([[1, 2]], "Expected integers"),
        ("a text", "got str"),
        ([1, [2]], "Expected an array of tokens"),
        ([0] * 201, f"at most {MAX_TOKENS} tokens, got {MAX_TOKENS + 1}"),
    ],
)
def test_wrong_tokens_are_refused(
    model: IncrementalModel, state: DocumentState, tokens: object, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        model.append(state, tokens)  # type: ignore[arg-type]


def test_growing_state_is_told_and_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A causal softmax attention keeps all keys and values, of 16 channels each."""
    bundle = exported(tmp_path, "dot_product_attention")
    console = Console(record=True, width=200)
    show_bundle(Bundle.open(bundle), console)
    shown = f"yes, with 0.125 KiB of state for each of at most {MAX_TOKENS} tokens"
    assert shown in console.export_text()
    model = IncrementalModel(bundle, threads=1)
    assert model.token_state_bytes == 128
    assert model.max_tokens == MAX_TOKENS
    states = [model.append(None, document(tokens))[1] for tokens in (10, 60)]
    assert states[1].nbytes - states[0].nbytes == 50 * 128
    assert len(model.save(states[1])) <= model.max_state_bytes
    assert model.load(model.save(states[1])).nbytes == states[1].nbytes
    monkeypatch.setattr("aftexport.bundle.manifest.MAX_STATE", 32 * 65)
    assert model.max_tokens == 65
    reason = "at most 65 tokens, whose keys and values fill a state of 8,320 bytes, got 66"
    with pytest.raises(InputError, match=reason):
        model.append(states[1], [1] * 6)
    model.append(states[1], [1] * 5)


def test_threads_share_model(model: IncrementalModel) -> None:
    documents = [document(40 + number) for number in range(4)]
    found: dict[int, np.ndarray] = {}

    def classify(number: int) -> None:
        state = None
        for piece in np.split(documents[number], [5, 6, 7, 20]):
            answer, state = model.append(state, piece)
        found[number] = answer.outputs["logits"]

    threads = [threading.Thread(target=classify, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, ids in enumerate(documents):
        expected = model.append(None, ids)[0].outputs["logits"]
        assert np.abs(found[number] - expected).max() <= TOLERANCES["fp32"].bound


def test_noncausal_bundle_is_refused(bundle_folder: Path) -> None:
    reason = r"not causal: its attention \(stage 1 of 1\) depends on later tokens"
    with pytest.raises(UsageError, match=reason):
        IncrementalModel(bundle_folder)


def test_reasons_name_manifest_entries(causal_bundle: Path) -> None:
    bundle = Bundle.open(causal_bundle)
    extra = ExtraInput(name="age", kind="document", dtype="float32")
    reasons = {
        None: {},
        "it takes the extra inputs age": {"extra_inputs": (extra,)},
        "Softmax acts on all tokens": {"chunked": None, "whole_only": "Softmax acts on all tokens"},
    }
    for reason, changes in reasons.items():
        changed = bundle.manifest.model_copy(update=changes)
        assert append_problem(dataclasses.replace(bundle, manifest=changed)) == reason


def test_import_needs_no_torch(causal_bundle: Path, tmp_path: Path) -> None:
    code = (
        "import sys, aftexport; m = aftexport.IncrementalModel(sys.argv[1]); "
        "print(m.append(None, [1, 2])[1].tokens, 'torch' in sys.modules)"
    )
    assert run_python("-c", code, causal_bundle, cwd=tmp_path).out.split() == ["2", "False"]
