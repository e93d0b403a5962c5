"""Folders of sentence-transformers give the library's vectors, or are refused."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import encoder_code
import numpy as np
import pytest
import safetensors.torch
import sentence_folders as sentences
import torch
import transformers_folders as folders
from commands import within
from sampling import any_case

from aftexport.checkpoint import load
from aftexport.checkpoint.sentence_config import POOLINGS
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.errors import CheckpointError
from aftexport.pipeline.export import export
from aftserve.model.classifier import Classifier

Change = Callable[[Path], None]


@pytest.mark.table(keep=0.5, by=lambda modes, form: form)
@pytest.mark.parametrize("modes", [*((mode,) for mode in POOLINGS), POOLINGS])
@pytest.mark.parametrize("form", [sentences.old_pooling, sentences.new_pooling])
def test_poolings_are_those_of_library(
    modes: tuple[str, ...], form: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    model = sentences.save(tmp_path, form(*modes))
    module = load(tmp_path).module
    assert module is not None
    ids = [[2, 8, 9, 10, 3], [2, 3], [2, 11, 3]]
    padded = torch.tensor([[*one, *[0] * (5 - len(one))] for one in ids])
    mask = torch.tensor([[1] * len(one) + [0] * (5 - len(one)) for one in ids])
    with torch.inference_mode():
        found = module.double()(padded, mask).numpy()
    for rows, vector in zip(sentences.token_vectors(model, ids), found, strict=True):
        np.testing.assert_allclose(vector, sentences.pooled(rows, modes), atol=1e-12)


@pytest.mark.slow
@pytest.mark.table(keep=0.5, by=any_case)
@pytest.mark.parametrize(
    ("modes", "kinds", "transformer", "class_name"),
    [
        (("mean",), ("Normalize",), "", "BertModel"),
        (("cls", "mean"), ("Dense", "Normalize"), "0_Transformer", "BertModel"),
        (("lasttoken",), ("Normalize", "Dense", "Dense"), "", "BertForMaskedLM"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*does not use these weights")
def test_served_vectors_are_those_of_library(
    modes: tuple[str, ...], kinds: Sequence[str], transformer: str, class_name: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    width = sentences.WIDTH * len(modes)
    model = sentences.save(
        folder,
        sentences.old_pooling(*modes),
        kinds,
        class_name=class_name,
        transformer=transformer,
        width=width,
    )
    bundle = export(folder, out=tmp_path / "model.bundle")
    (head,) = bundle.manifest.heads.values()
    assert (head.task, head.is_per_token) == ("feature_extraction", False)
    assert head.width == width >> kinds.count("Dense")
    assert bundle.manifest.max_tokens == 24
    classifier = Classifier(bundle, OnnxRuntimeEngine(bundle.model_path))
    ids = [classifier.encode(text)[:24] for text in folders.TEXTS]
    answers = classifier.classify(ids)  # one padded run
    base = getattr(model, "bert", model)
    tokens = sentences.token_vectors(base, [one.tolist() for one in ids])
    for rows, answer in zip(tokens, answers, strict=True):
        expected = sentences.after(folder, kinds, sentences.pooled(rows, modes))
        np.testing.assert_allclose(answer.heads["logits"].vector, expected, atol=2e-5)


@pytest.mark.parametrize(
    ("settings", "of_tokenizer", "limit"),
    [
        ({"max_seq_length": 24}, 20, 24),
        ({"max_seq_length": 24}, 30, 24),
        ({"max_seq_length": 1000}, 20, folders.MAX_TOKENS),
        ({"max_seq_length": None}, 20, 20),
        ({}, 20, 20),
        (None, 20, 20),
        (None, None, folders.MAX_TOKENS),
        (None, int(1e30), folders.MAX_TOKENS),
    ],
)
def test_limit_of_tokenizer_counts_last(
    settings: dict[str, Any] | None, of_tokenizer: int | None, limit: int, tmp_path: Path
) -> None:
    """The library writes max_seq_length over the tokenizer's model_max_length."""
    sentences.save(tmp_path, sentences.new_pooling("mean"))
    path = tmp_path / "sentence_bert_config.json"
    path.unlink()
    if settings is not None:
        sentences.write(path, settings)
    changed("tokenizer_config.json", model_max_length=of_tokenizer)(tmp_path)
    assert getattr(load(tmp_path).module, "max_length", None) == limit


@pytest.mark.parametrize(
    "flags", [{}, {"pooling_mode_cls_token": False}, {"pooling_mode_mean_tokens": True}]
)
def test_pooling_without_other_flags_is_mean(flags: dict[str, bool], tmp_path: Path) -> None:
    model = sentences.save(tmp_path, {"word_embedding_dimension": sentences.WIDTH, **flags})
    module = load(tmp_path).module
    assert module is not None
    with torch.inference_mode():
        found = module.double()(torch.tensor([[2, 8, 9, 3]])).numpy()
    (rows,) = sentences.token_vectors(model, [[2, 8, 9, 3]])
    np.testing.assert_allclose(found[0], sentences.pooled(rows, ["mean"]), atol=1e-12)


def test_large_settings_of_tokenizer_are_read(tmp_path: Path) -> None:
    """Some families list thousands of added tokens, in more than 1 MB."""
    sentences.save(tmp_path, sentences.new_pooling("mean"))
    changed(TRANSFORMER, max_seq_length=None)(tmp_path)
    changed("tokenizer_config.json", model_max_length=20, note="x" * (3 << 19))(tmp_path)
    assert getattr(load(tmp_path).module, "max_length", None) == 20


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good") / "model"
    sentences.save(folder, sentences.old_pooling("mean"), ("Dense", "Normalize"))
    return folder


def changed(place: str, **entries: Any) -> Change:
    """Return a change of entries in a file of JSON, which may be absent."""

    def change(folder: Path) -> None:
        path = folder / place
        content = json.loads(path.read_text()) if path.exists() else {}
        sentences.write(path, content | entries)

    return change


def module(number: int, **entries: Any) -> Change:
    """Return a change of entries of a module."""

    def change(folder: Path) -> None:
        path = folder / "modules.json"
        modules = json.loads(path.read_text())
        modules[number] |= entries
        sentences.write(path, modules)

    return change


def written(place: str, content: str) -> Change:
    return lambda folder: (folder / place).write_text(content) and None  # type: ignore[func-returns-value]


def dense_weights(**state: torch.Tensor) -> Change:
    def change(folder: Path) -> None:
        tensors = {f"linear.{name}": tensor for name, tensor in state.items()}
        safetensors.torch.save_file(tensors, folder / "2_Dense" / "model.safetensors")

    return change


def pickled_dense(folder: Path) -> None:
    (folder / "2_Dense" / "model.safetensors").rename(folder / "2_Dense" / "pytorch_model.bin")


def sharded_dense(folder: Path) -> None:
    path = folder / "2_Dense" / "model.safetensors"
    path.rename(path.with_name("a.safetensors"))
    index = {"weight_map": dict.fromkeys(("linear.weight", "linear.bias"), "a.safetensors")}
    sentences.write(path.with_name("model.safetensors.index.json"), index)


def pooling_of(**flags: bool) -> Change:
    entries = {"word_embedding_dimension": sentences.WIDTH, **flags}
    return lambda folder: sentences.write(folder / "1_Pooling" / "config.json", entries)


def limit_of_tokenizer(value: object) -> Change:
    def change(folder: Path) -> None:
        changed(TRANSFORMER, max_seq_length=None)(folder)
        changed("tokenizer_config.json", model_max_length=value)(folder)

    return change


LSTM = "sentence_transformers.models.LSTM"
KINDS = "modules Transformer, Pooling, Dense, Normalize, got"
POOLING, DENSE = "1_Pooling/config.json", "2_Dense/config.json"
TRANSFORMER, SETTINGS = "sentence_bert_config.json", "config_sentence_transformers.json"
BAD: dict[str, tuple[Change, str]] = {
    "another module": (module(3, type=LSTM), f"{KINDS} {LSTM}"),
    "a module of other code": (module(1, type="my.Pooling"), f"{KINDS} my.Pooling"),
    "no pooling": (
        module(1, type="sentence_transformers.models.Normalize"),
        "a Transformer, a Pooling, and then Dense or Normalize, got Transformer, Normalize",
    ),
    "a path outside": (module(1, path="../1_Pooling"), "the name of a folder beside it"),
    "an absolute path": (module(2, path="/etc"), "the name of a folder beside it"),
    "a number as path": (module(2, path=5), "the name of a folder beside it"),
    "an object of modules": (written("modules.json", "{}"), "a list of 2 to 16 modules"),
    "many modules": (written("modules.json", json.dumps([{}] * 1000)), "a list of 2 to 16"),
    "a number as module": (written("modules.json", "[1, 2]"), "an object for each module"),
    "deep modules": (written("modules.json", "[" * 100_000), "not valid JSON"),
    "huge modules": (written("modules.json", "[" + " " * (1 << 20) + "]"), "at most 1048576 bytes"),
    "unknown pooling": (
        changed(POOLING, pooling_mode="median"),
        "one or several of cls, max, mean, mean_sqrt_len_tokens, weightedmean, lasttoken",
    ),
    "no pooling mode": (changed(POOLING, pooling_mode=[]), "one or several of cls"),
    "no flag of the mean": (
        pooling_of(pooling_mode_cls_token=True), "expected pooling_mode_mean_tokens and a kind"),
    "no flag that is true": (
        changed(POOLING, pooling_mode_mean_tokens=False), "a kind of pooling that is true"),
    "many poolings": (changed(POOLING, pooling_mode=["mean"] * 50), "one or several of cls"),
    "unknown setting of a pooling": (changed(POOLING, pooling_mode_median=True), "the settings"),
    "another width of the pooling": (
        changed(POOLING, word_embedding_dimension=17),
        "the width 16 of the model's vectors, got 17",
    ),
    "a flag that is a number": (changed(POOLING, pooling_mode_lasttoken=2), "true or false"),
    "unknown activation": (changed(DENSE, activation_function="torch.nn.Softmax"), "among Ident"),
    "an activation of other code": (changed(DENSE, activation_function="os.Tanh"), "of torch.nn"),
    "residual": (changed(DENSE, use_residual=True), "use_residual false, got True"),
    "another width of the Dense": (changed(DENSE, in_features=8), "in_features 16"),
    "a huge Dense": (changed(DENSE, out_features=1 << 40), "expected the weights"),
    "another vector": (changed(DENSE, module_input_name="cls"), "module_input_name"),
    "another shape": (
        dense_weights(weight=torch.ones(8, 15), bias=torch.ones(8)), "expected the weights"
    ),
    "an absent bias": (dense_weights(weight=torch.ones(8, 16)), "expected the weights"),
    "a pickled Dense": (pickled_dense, "SentenceTransformer(folder).save_pretrained(other)"),
    "a Dense in several files": (
        sharded_dense, "expected model.safetensors for its Dense module, got model.safetensors.ind"
    ),
    "a Dense without weights": (
        lambda folder: (folder / "2_Dense" / "model.safetensors").unlink(), "got no weights"),
    "lower case": (changed(TRANSFORMER, do_lower_case=True), "do_lower_case false or null"),
    "a limit of the tokenizer that is true": (
        limit_of_tokenizer(True), "model_max_length of at least 1, got True"),
    "a limit of the tokenizer that is text": (
        limit_of_tokenizer("20"), "model_max_length of at least 1, got 20"),
    "huge settings of the tokenizer": (
        limit_of_tokenizer("x" * (1 << 24)), "at most 16777216 bytes"),
    "a huge configuration": (
        changed("config.json", note="x" * (1 << 24)), "at most 16777216 bytes"),
    "a limit of 0": (changed(TRANSFORMER, max_seq_length=0), "max_seq_length of at least 1"),
    "another output": (changed(TRANSFORMER, module_output_name="x"), "module_output_name"),
    "an unknown setting": (changed(TRANSFORMER, tokens_first=True), "the settings max_seq_length"),
    "a prompt": (
        changed(SETTINGS, default_prompt_name="query", prompts={"query": "query: "}),
        "no default_prompt_name, as a bundle takes texts as they are, got query",
    ),
    "an unknown prompt": (
        changed(SETTINGS, default_prompt_name="query", prompts={"document": ""}),
        "no default_prompt_name, as a bundle takes texts as they are, got query",
    ),
    "a name of a prompt without prompts": (
        changed(SETTINGS, default_prompt_name="query"), "no default_prompt_name"),
    "a number as name of a prompt": (
        changed(SETTINGS, default_prompt_name=5, prompts=None), "no default_prompt_name"),
    "sparse vectors": (changed(SETTINGS, model_type="SparseEncoder"), "SentenceTransformer"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_other_vectors_are_refused(kind: str, good: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(good, tmp_path / "model"))
    change, message = BAD[kind]
    change(folder)
    with within(60), pytest.raises(CheckpointError) as refusal:
        load(folder)
    assert message in str(refusal.value)
    assert len(str(refusal.value)) < 1500


def test_empty_prompts_are_accepted(good: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(good, tmp_path / "model"))
    prompts = {"query": "", "document": ""}
    changed(SETTINGS, default_prompt_name="query", prompts=prompts)(folder)
    assert load(folder).task == "feature_extraction"


def save_own_code(folder: Path, auto_map: dict[str, str], code: str) -> Any:
    """Write a folder whose model is in its own code; return the base model."""
    sentences.save(folder, sentences.new_pooling("mean"), transformer="0_Transformer")
    shutil.rmtree(folder / "0_Transformer")
    return encoder_code.save(folder / "0_Transformer", auto_map, code)


@pytest.mark.filterwarnings("ignore")  # the library warns of the code
def test_vectors_of_own_code_are_of_base_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """config.json names the class with the head; the library takes AutoModel of auto_map."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    model = save_own_code(folder, encoder_code.AUTO_MAP, encoder_code.CODE)
    with pytest.raises(CheckpointError, match="--trust-remote-code"):
        load(folder)
    checkpoint = load(folder, trust_remote_code=True)
    assert checkpoint.kind == "sentence-transformers folder of OwnModel"
    assert checkpoint.module is not None
    with torch.inference_mode():
        found = checkpoint.module.double()(torch.tensor([[2, 8, 9, 3]])).numpy()
    (rows,) = sentences.token_vectors(model, [[2, 8, 9, 3]])
    np.testing.assert_allclose(found[0], sentences.pooled(rows, ["mean"]), atol=1e-12)


HEAD_ONLY = {name: encoder_code.AUTO_MAP[name] for name in ("AutoConfig", "AutoModelForMaskedLM")}


@pytest.mark.parametrize(
    ("auto_map", "change", "message"),
    [
        (HEAD_ONLY, ("", ""), r"expected AutoModel in auto_map.*got only OwnForMaskedLM"),
        (
            encoder_code.AUTO_MAP | {"AutoModel": "modeling_own.OwnForMaskedLM"},
            ("", ""),
            "OwnForMaskedLM to return last_hidden_state .*KeyError: 'last_hidden_state'",
        ),
        (
            encoder_code.AUTO_MAP,
            (".tanh())", ".no_such_function())"),
            "OwnModel to return last_hidden_state .*AttributeError",
        ),
        (encoder_code.AUTO_MAP, (".tanh())", ".sum(1))"), r"shape \(1, 2, width\), got \(1, 16\)"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # the library warns of the code
def test_own_code_without_vectors_is_refused(
    auto_map: dict[str, str],
    change: tuple[str, str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    save_own_code(tmp_path / "model", auto_map, encoder_code.CODE.replace(*change))
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "model", trust_remote_code=True)
