"""Folders of transformers are read whole, and bad ones are refused before they take memory."""

import json
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers_folders as folders
from commands import within
from tokenizers import Tokenizer, models

import aftexport.checkpoint.transformers_folder
from aftexport.checkpoint import load
from aftexport.checkpoint.transformers_class import MAX_LAYERS, TransformersModel
from aftexport.errors import CheckpointError, TraceError, UsageError
from aftexport.pipeline.export import export
from aftexport.pipeline.trace import library_remedy

Change = Callable[[Path], None]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good") / "model"
    config = folders.bert(**folders.named(folders.LABELS))
    folders.save(folder, "BertForSequenceClassification", config)
    return folder


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    """A folder to change."""
    return Path(shutil.copytree(good, tmp_path / "model"))


def config(**entries: Any) -> Change:
    """Return a change of entries in config.json."""

    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | entries))

    return change


def weights(**changed: Callable[[torch.Tensor], torch.Tensor] | None) -> Change:
    """Return a change of weights, or of their presence; ``_`` stands for a dot in their names."""

    def change(folder: Path) -> None:
        path = folder / "model.safetensors"
        state = safetensors.torch.load_file(path)
        for name, edit in changed.items():
            own = next(key for key in state if key.replace(".", "_") == name)
            tensor = state.pop(own)
            if edit is not None:
                state[own] = edit(tensor)
        safetensors.torch.save_file(state, path, {"format": "pt"})

    return change


def shards(content: str) -> Change:
    """Return a change of the weights into an index with this content."""

    def change(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(content)

    return change


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def code(folder: Path) -> None:
    (folder / "modeling_linear.py").write_text("raise SystemExit('this code must not run')")
    config(
        architectures=["LinearForSequenceClassification"],
        model_type="linear_text",
        auto_map=folders.LINEAR_AUTO_MAP,
    )(folder)


BAD: dict[str, tuple[Change, str]] = {
    "class of another library": (
        config(architectures=["NotInTheLibrary"]), "model class of the transformers library"),
    "name of a function": (config(architectures=["pipeline"]), "model class of the transformers"),
    "no class": (config(architectures=None), "one model class in architectures, got None"),
    "two classes": (config(architectures=["A", "B"]), "one model class in architectures"),
    "class without a head for documents": (
        config(architectures=["BertForMaskedLM"]), r"got BertForMaskedLM.*AutoModel"),
    "class of another type": (
        config(architectures=["RobertaModel"]), "model_type must be 'roberta' for RobertaModel"),
    "code in the folder": (code, "--trust-remote-code only if you trust"),
    "adapter": (adapter, "merge_and_unload"),
    "class of pictures": (
        config(architectures=["ViTModel"], model_type="vit"), "takes input_ids, got ViTModel"),
    "quantized": (config(quantization_config={"bits": 4}), "quantization_config"),
    "pickled weights": (pickled, "pytorch_model.bin, a pickle"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no model.safetensors"),
    "weights cut off": (cut, "not a complete safetensors file"),
    "index outside the folder": (
        shards('{"weight_map": {"a": "../model.safetensors"}}'), r"names of \.safetensors files"),
    "index of a missing file": (
        shards('{"weight_map": {"a": "b.safetensors"}}'), r"lacks b\.safetensors"),
    "index no object": (shards("[]"), "weight_map"),
    "index no JSON": (shards("[" * 100_000), "not valid JSON"),
    "index without end": (shards(" " * (1 << 24) + "{}"), "at most 16777216 bytes"),
    "configuration without end": (config(note="x" * (1 << 24)), "at most 16777216 bytes"),
    "head missing": (
        weights(classifier_weight=None), "missing: classifier.weight.*trained model"),
    "weight of another shape": (weights(classifier_weight=lambda t: t[:2].clone()),
        r"other shapes: classifier.weight \(2, 16\) instead of \(3, 16\)"),
    "weight NaN": (weights(classifier_bias=lambda t: t * torch.nan), "NaN in .*classifier.bias"),
    "layers without end": (config(num_hidden_layers=1 << 40), "num_hidden_layers must be at most"),
    "labels without end": (config(num_labels=1 << 40, id2label=None), "num_labels must be at most"),
    "vocabulary without end": (config(vocab_size=1 << 40), "numbers in the weights, got"),
    "positions without end": (
        config(max_position_embeddings=1 << 40), "numbers in the weights, got"),
    "size no number": (config(hidden_size="wide"), "configuration"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "entries"),
    [
        ("Albert", {"inner_group_num": 10**9}),
        ("Albert", {"num_hidden_groups": 10**9}),
        ("Funnel", {"block_sizes": [10**9]}),
        ("Bert", {"num_hidden_layers": MAX_LAYERS}),
    ],
)
def test_modules_without_end_are_refused(name: str, entries: Any, tmp_path: Path) -> None:
    """The building of the empty model ends, and leaves no hook in the process."""
    path = tmp_path / "model"
    folders.save(path, f"{name}ForSequenceClassification", folders.tiny(name))
    load(path)
    config(**entries)(path)
    with within(60), pytest.raises(CheckpointError, match="modules and parameters"):
        load(path)
    torch.nn.ModuleList(torch.nn.Identity() for _ in range(10_000))


def test_default_counts_of_small_model_are_read(tmp_path: Path) -> None:
    """Qwen2 has ``max_window_layers`` of 28 by default, above the number of its weights here."""
    path = tmp_path / "model"
    folders.save(path, "Qwen2ForSequenceClassification", folders.tiny("Qwen2"))
    content = json.loads((path / "config.json").read_text())
    assert content["max_window_layers"] == 28
    state = safetensors.torch.load_file(path / "model.safetensors")
    assert len(state) < 28
    assert load(path).labels is not None


@pytest.mark.parametrize("kind", BAD)
def test_bad_folder_is_refused(kind: str, folder: Path) -> None:
    change, message = BAD[kind]
    change(folder)
    with within(30), pytest.raises((CheckpointError, UsageError), match=message):
        load(folder)


def test_model_without_padding_token_is_refused(tmp_path: Path) -> None:
    """GPT-2 takes the vector of the last token before the padding."""
    import transformers

    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8, "vocab_size": 30}
    for padding, message in ((None, "pad_token_id must be a token id for GPT2For"), (3, None)):
        folder = tmp_path / str(padding)
        own = transformers.GPT2Config(**sizes, num_labels=3, pad_token_id=padding)
        transformers.GPT2ForSequenceClassification(own).save_pretrained(folder)
        if message is None:
            module = load(folder).module
            assert isinstance(module, TransformersModel)
            assert module.max_length == 8
            continue
        with pytest.raises(CheckpointError, match=message):
            load(folder)


def bart(name: str = "Bart") -> Any:
    import transformers

    sizes = {"encoder_layers": 1, "decoder_layers": 1, "d_model": 16, "vocab_size": 300}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = getattr(transformers, f"{name}Config")
    return config(**sizes, **heads, encoder_ffn_dim=8, decoder_ffn_dim=8)


def test_encoder_with_decoder_is_refused(tmp_path: Path) -> None:
    folders.save(tmp_path / "model", "T5Model", folders.t5(decoder_start_token_id=0))
    with pytest.raises(CheckpointError, match=r"got T5Model.*T5EncoderModel"):
        load(tmp_path / "model")


def test_decoder_without_encoder_class_is_refused(tmp_path: Path) -> None:
    """The library has no class of BART's encoder that a folder can name."""
    folders.save(tmp_path / "model", "BartModel", bart())
    with pytest.raises(CheckpointError, match=r"got BartModel.*around the encoder.*--factory"):
        load(tmp_path / "model")


@pytest.mark.parametrize(
    ("name", "build"),
    [
        ("T5", lambda: folders.t5(decoder_start_token_id=0)),
        ("Bart", bart),
        ("MBart", partial(bart, "MBart")),
    ],
)
def test_end_token_is_classified(name: str, build: Any, tmp_path: Path) -> None:
    """Documents may have different numbers of end tokens, which the library refuses in a batch."""
    config = build()
    model = folders.save(tmp_path / "model", f"{name}ForSequenceClassification", config)
    module = load(tmp_path / "model").module
    assert isinstance(module, TransformersModel)
    end, padding = config.eos_token_id, config.pad_token_id
    ids = torch.tensor([[9, end, 8, end, padding], [7, 6, 5, 9, end], [5, 6, 4, 7, end]])
    lengths = (4, 5, 5)
    mask = (torch.arange(5) < torch.tensor(lengths)[:, None]).long()
    with torch.inference_mode():
        given = module(ids, mask)
        for row, tokens in enumerate(lengths):
            expected = model(ids[row : row + 1, :tokens], mask[row : row + 1, :tokens]).logits
            torch.testing.assert_close(given[row : row + 1], expected, atol=1e-5, rtol=1e-5)
        without = torch.tensor([[9, 8, 7, padding, padding]])
        last = module(without, torch.tensor([[1, 1, 1, 0, 0]]))
        torch.testing.assert_close(last, module(without[:, :3], None), atol=1e-6, rtol=1e-5)


@pytest.mark.slow
def test_refusal_asks_for_another_model(tmp_path: Path) -> None:
    """Whoever has a folder cannot rewrite the library, whose code may only fit some lengths."""
    import transformers

    config = transformers.NystromformerConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, num_landmarks=16, segment_means_seq_len=64,
    )  # fmt: skip
    model = transformers.NystromformerForSequenceClassification(config)
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(TraceError, match="modeling_nystromformer") as refused:
        export(tmp_path / "model")
    assert refused.value.remedy.startswith("Give a model of a family that docs/models.md lists")


@pytest.mark.parametrize(
    ("given", "own"),
    [
        ("Mask the tokens from lengths on, or add --no-batching, which", "Add --no-batching."),
        ("Remove branches. Or export one branch only: --max-length 704.", "Add --max-length 704."),
    ],
)
def test_remedy_keeps_option(given: str, own: str) -> None:
    assert library_remedy(given) == own


@pytest.mark.parametrize("limit", [float("inf"), float("-inf"), float("nan")])
def test_number_that_json_lacks_is_read(limit: float, tmp_path: Path) -> None:
    """The library writes it as an object; Mamba-2 and its kin have infinity by default."""
    import transformers

    sizes = {"hidden_size": 16, "num_heads": 4, "head_dim": 8, "state_size": 4, "n_groups": 2}
    own = transformers.Mamba2Config(**sizes, vocab_size=30, num_hidden_layers=1, chunk_size=4)
    own.time_step_limit = (0.5, limit)
    folders.save(tmp_path / "model", "Mamba2Model", own)
    assert "__float__" in (tmp_path / "model" / "config.json").read_text()
    module = load(tmp_path / "model").module
    assert isinstance(module, TransformersModel)
    assert repr(tuple(module.model.config.time_step_limit)) == repr((0.5, limit))


def test_missing_library_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = aftexport.checkpoint.transformers_folder
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="pip install transformers"):
        load(folder)


def test_weights_of_16_bits_load_in_float32(folder: Path) -> None:
    path = folder / "model.safetensors"
    state = {name: t.bfloat16() for name, t in safetensors.torch.load_file(path).items()}
    safetensors.torch.save_file(state, path, {"format": "pt"})
    config(dtype="bfloat16", torch_dtype="bfloat16")(folder)
    module = load(folder).module
    assert isinstance(module, TransformersModel)
    loaded = module.model.state_dict()
    assert {tensor.dtype for tensor in loaded.values()} == {torch.float32}
    torch.testing.assert_close(
        loaded["classifier.weight"], state["classifier.weight"].float(), rtol=0, atol=0
    )


def test_labels_of_the_configuration_are_read(folder: Path) -> None:
    config(problem_type="multi_label_classification")(folder)
    read = load(folder)
    assert (read.task, read.labels) == ("multi_label_classification", folders.LABELS)
    assert read.kind == "transformers folder of BertForSequenceClassification"


@pytest.mark.parametrize(
    ("name", "build"),
    [
        ("BertForSequenceClassification", folders.bert),
        ("RobertaForSequenceClassification", folders.roberta),
        ("XLMRobertaForSequenceClassification", folders.xlm_roberta),
        ("ModernBertForSequenceClassification", folders.modernbert),
    ],
)
def test_tokenizer_gives_the_ids_of_the_library(name: str, build: Any, tmp_path: Path) -> None:
    import transformers

    folders.save(tmp_path / "model", name, build())
    text = load(tmp_path / "model").tokenizer
    assert text is not None
    own, library = (
        Tokenizer.from_str(text),
        transformers.AutoTokenizer.from_pretrained(str(tmp_path / "model"), local_files_only=True),
    )
    for sample in folders.TEXTS:
        assert own.encode(sample).ids == library(sample)["input_ids"]
    assert own.truncation is None
    assert own.padding is None


def test_tokenizer_with_segments_is_left_out(folder: Path) -> None:
    """XLNet and Funnel give a segment of its own to ``[CLS]``: the exported model has segment 0."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    piece = {"Sequence": {"id": "A", "type_id": 0}}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 2}}, piece],
        "pair": [piece, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"[CLS]": {"id": "[CLS]", "ids": [2], "tokens": ["[CLS]"]}},
    }
    path.write_text(json.dumps(content))
    settings = folder / "tokenizer_config.json"
    names = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}
    settings.write_text(json.dumps(json.loads(settings.read_text()) | names))
    with pytest.warns(UserWarning, match="left out: its tokens have segments other than 0"):
        assert load(folder).tokenizer is None


def test_left_padding_is_left_out(folder: Path) -> None:
    """The server pads on the right, whatever the tokenizer does."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    expected = tokenizer.encode("Ada met Grace").ids
    tokenizer.enable_padding(direction="left", length=30)
    tokenizer.enable_truncation(5)
    tokenizer.save(str(folder / "tokenizer.json"))
    text = load(folder).tokenizer
    assert text is not None
    assert Tokenizer.from_str(text).encode("Ada met Grace").ids == expected


def test_left_truncation_is_said(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"truncation_side": "left"}))
    with pytest.warns(UserWarning, match="--long-documents tail"):
        assert load(folder).tokenizer is not None


def test_tokenizer_beyond_the_vocabulary_is_refused(folder: Path) -> None:
    words = {f"word{number}": number for number in range(400)}
    Tokenizer(models.WordLevel(words, unk_token="word0")).save(str(folder / "tokenizer.json"))
    with pytest.raises(UsageError, match=r"below the model's 300"):
        export(folder)


def test_linear_attention_in_code_is_fused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trusted class of the folder is exported, and its linear attention is recognized."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    namespace: dict[str, Any] = {"__name__": "written"}
    exec(folders.LINEAR_CODE, namespace)
    torch.manual_seed(0)
    own = namespace["LinearConfig"](
        auto_map=folders.LINEAR_AUTO_MAP, **folders.named(folders.LABELS)
    )
    folder = tmp_path / "model"
    namespace["LinearForSequenceClassification"](own).save_pretrained(folder)
    (folder / "modeling_linear.py").write_text(folders.LINEAR_CODE)
    with pytest.raises(CheckpointError, match="--trust-remote-code"):
        load(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the library, about the code
        bundle = export(folder, trust_remote_code=True)
    assert bundle.manifest.operators == {
        "LayerNormQueryKeyValue": 1,
        "NormalizedLinearAttention": 1,
    }
    assert list(bundle.manifest.heads["logits"].names) == list(folders.LABELS)
