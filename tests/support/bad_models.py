"""Model files that must be refused: what is wrong with each, and what the refusal must say."""

import io
import json
import os
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import safetensors.torch
import tiny_models
import torch

MARKER = "the-file-ran-code"
Build = Callable[[Path, Path], Path]
"""(an empty folder, a good checkpoint) to the path of a bad model."""


class Hostile:
    """Makes a folder when unpickled."""

    def __init__(self, folder: Path) -> None:
        self.target = str(folder / MARKER)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.target,)


def holding(content: bytes, name: str = "model.pt") -> Build:
    def build(folder: Path, good: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return build


def saved(make: Callable[[Path], Any], **options: Any) -> Build:
    def build(folder: Path, good: Path) -> Path:
        path = folder / "model.pt"
        torch.save(make(folder), path, **options)
        return path

    return build


def altered(change: Callable[[dict[str, Any]], Any]) -> Build:
    """The good checkpoint with its content changed in place."""

    def build(folder: Path, good: Path) -> Path:
        content = torch.load(good)
        change(content)
        torch.save(content, folder / "model.pt")
        return folder / "model.pt"

    return build


def config(**changes: Any) -> Build:
    return altered(lambda content: content["config"].update(changes))


def weight(name: str, change: Callable[[torch.Tensor], Any]) -> Build:
    def apply(content: dict[str, Any]) -> None:
        content["state_dict"][name] = change(content["state_dict"][name])

    return altered(apply)


def cut(part: float) -> Build:
    def build(folder: Path, good: Path) -> Path:
        whole = good.read_bytes()
        return holding(whole[: int(len(whole) * part)])(folder, good)

    return build


def directory_of_zip_overwritten(folder: Path, good: Path) -> Path:
    content = good.read_bytes().replace(b"PK\x01\x02", b"\0\0\0\0", 1)
    return holding(content)(folder, good)


def one_weight_bit_flipped(folder: Path, good: Path) -> Path:
    content = bytearray(good.read_bytes())
    values = torch.load(good)["state_dict"]["embedding.weight"][7:9].numpy().tobytes()
    content[content.index(values) + 3] ^= 1
    return holding(bytes(content))(folder, good)


def compressed(folder: Path, good: Path) -> Path:
    with zipfile.ZipFile(good) as archive, zipfile.ZipFile(folder / "model.pt", "w") as copy:
        for member in archive.namelist():
            copy.writestr(member, archive.read(member), zipfile.ZIP_DEFLATED)
    return folder / "model.pt"


def zip_of(*names: str, suffix: str = ".pt") -> Build:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in names:
            archive.writestr(name, "junk")
    return holding(buffer.getvalue(), f"model{suffix}")


def torch_script(folder: Path, good: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), folder / "model.pt")
    return folder / "model.pt"


def onnx_bytes() -> bytes:
    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    graph = onnx.helper.make_graph([], "empty", [value], [value])
    return onnx.helper.make_model(graph).SerializeToString()


def model_folder(**files: str | bytes | None) -> Build:
    """A good folder with the named files changed; ``_`` stands for the dot, None for absent."""

    def build(folder: Path, good: Path) -> Path:
        content, target = torch.load(good), folder / "model"
        target.mkdir()
        settings = content["config"] | {"labels": content["labels"]}
        (target / "config.json").write_text(json.dumps(settings))
        (target / "tokenizer.json").write_text(content["tokenizer"])
        safetensors.torch.save_file(content["state_dict"], target / "model.safetensors")
        for name, change in files.items():
            path = target / name.replace("_", ".")
            if change is None:
                path.unlink()
            else:
                path.write_bytes(change.encode() if isinstance(change, str) else change)
        return target

    return build


def _drop(name: str) -> Build:
    return altered(lambda content: content["state_dict"].pop(name))


def _tokenizer_with(tokens: dict[str, int]) -> str:
    return tiny_models.Tokenizer(
        tiny_models.models.WordLevel(tokens, unk_token=next(iter(tokens)))
    ).to_str()


BAD_MODELS: dict[str, tuple[Build, tuple[str, ...]]] = {
    "no such file": (lambda folder, good: folder / "absent.pt", ("no such file",)),
    "name longer than the system allows": (lambda folder, good: folder / ("m" * 300), ()),
    "file used as a folder": (
        lambda folder, good: holding(b"text")(folder, good) / "weights.pt", ("no such file",)),
    "empty": (holding(b""), ("empty",)),
    "empty .pt2": (holding(b"", "model.pt2"), ()),
    "empty .safetensors": (holding(b"", "model.safetensors"), ()),
    "text": (holding(b"hello\n" * 40), ("not a PyTorch file",)),
    "three bytes of pickle": (holding(b"\x80\x02."), ()),
    "cut within its header": (cut(0.001), ("truncated",)),
    "cut in half": (cut(0.5), ("truncated",)),
    "cut at nine tenths": (cut(0.9), ("truncated",)),
    "zip directory damaged": (directory_of_zip_overwritten, ("damaged",)),
    "one bit of a weight flipped": (one_weight_bit_flipped, ("damaged",)),
    "zip compressed": (compressed, ("compressed",)),
    "zip of junk": (zip_of("a.txt", "b/c.txt"), ("zip archive",)),
    "zip of junk named .pt2": (zip_of("a.txt", suffix=".pt2"), ()),
    "TorchScript": (torch_script, ("TorchScript", "state dict")),
    "ONNX": (holding(onnx_bytes(), "model.onnx"), ("expected a graph with nodes",)),
    "ONNX named .pt": (holding(onnx_bytes()), ()),
    "Git LFS pointer": (
        holding(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"),
        ("Git LFS", "git lfs pull")),
    "pickle that runs code": (saved(Hostile), ("run code", "--allow-pickle")),
    "pickle that runs code, old format": (
        saved(Hostile, _use_new_zipfile_serialization=False), ("run code", "--allow-pickle")),
    "pickled module": (saved(lambda _: tiny_models.Bag()), ("run code", "--allow-pickle")),
    "list of tensors": (saved(lambda _: [torch.ones(1)]), ("list",)),
    "dict of text": (saved(lambda _: {"a": "b"}), ()),
    "empty state dict": (saved(lambda _: {}), ()),
    "bare state dict without --factory": (
        saved(lambda _: tiny_models.Bag().state_dict()), ("--factory", "state dict")),
    "state dict numbered": (saved(lambda _: {0: torch.ones(1)}), ()),
    "newer checkpoint version": (
        altered(lambda content: content.update(version=2)), ("version 2", "Upgrade")),
    "no config": (altered(lambda content: content.pop("config")), ("no config",)),
    "weights not a dict": (altered(lambda content: content.update(state_dict=[])), ("state_dict",)),
    "unknown mechanism": (config(mechanism="aft_huge"), ("aft_huge", "aft_local")),
    "unknown config entry": (config(dmi=16), ("dmi",)),
    "config entry of the wrong type": (config(dim="16"), ("dim",)),
    "config entry no name": (altered(lambda content: content["config"].update({1: 2})), ()),
    "causal no truth value": (config(causal="yes"), ("causal",)),
    "rank negative": (config(mechanism="aft_full", max_length=8, bias_rank=-1), ("bias_rank",)),
    "vocabulary larger than memory": (config(vocab_size=10**15), ()),
    "heads that do not divide": (config(num_heads=3), ("num_heads",)),
    "missing weights": (_drop("head.bias"), ("missing weights: head.bias",)),
    "unexpected weights": (
        altered(lambda content: content["state_dict"].update(extra=torch.ones(1))),
        ("unexpected weights: extra",)),
    "weight under a number": (
        altered(lambda content: content["state_dict"].update({1: torch.ones(1)})), ("1",)),
    "weight of integers": (
        weight("head.bias", lambda tensor: tensor.to(torch.int8)),
        ("integers in place of weights: head.bias int8",)),
    "weight of another shape": (
        weight("head.bias", lambda t: t[:2]), ("head.bias (2,) instead of (3,)",)),
    "weight no tensor": (weight("head.bias", torch.Tensor.tolist), ("head.bias",)),
    "weight sparse": (weight("head.weight", torch.Tensor.to_sparse), ("head.weight",)),
    "weight without data": (weight("head.bias", lambda t: t.to("meta")), ("head.bias",)),
    "weight complex": (weight("head.bias", lambda t: t + 1j), ("head.bias",)),
    "weight past float32": (weight("head.bias", lambda t: t.double() * 1e300), ("head.bias",)),
    "NaN weight": (weight("head.bias", lambda t: t * torch.nan), ("NaN", "head.bias")),
    "infinite weight": (weight("head.bias", lambda t: t + torch.inf), ("infinity", "head.bias")),
    "too few labels": (altered(lambda content: content.update(labels=["a", "b"])), ("label",)),
    "labels twice": (altered(lambda content: content.update(labels=["a", "b", "b"])), ("label",)),
    "labels no text": (altered(lambda content: content.update(labels=[1, 2, 3])), ("label",)),
    "tokenizer no JSON": (altered(lambda content: content.update(tokenizer="{")), ("tokenizer",)),
    "tokenizer no text": (altered(lambda content: content.update(tokenizer=5)), ("tokenizer",)),
    "tokenizer with ids past the vocabulary": (
        altered(lambda content: content.update(tokenizer=_tokenizer_with({"a": 0, "b": 300}))),
        ("300",)),
    "folder empty": (
        lambda folder, good: (folder / "model").mkdir() or folder / "model", ("config.json",)),
    "folder without config.json": (model_folder(config_json=None), ("config.json",)),
    "folder without weights": (model_folder(model_safetensors=None), ("model.safetensors",)),
    "folder with weights in shards": (
        model_folder(model_safetensors=None, model_safetensors_index_json="{}"),
        ("model.safetensors.index.json lists", "Join them")),
    "folder of transformers without a class": (
        model_folder(config_json=json.dumps({"model_type": "bert", "hidden_size": 8})),
        ("one model class in architectures, got None",)),
    "folder with bad JSON": (model_folder(config_json="{"), ("config.json", "JSON")),
    "folder with nested JSON": (model_folder(config_json="[" * 100_000), ("config.json",)),
    "folder with JSON no object": (model_folder(config_json="[]"), ("config.json",)),
    "folder with labels in one word": (
        model_folder(config_json=json.dumps(tiny_models.CONFIG | {"labels": "abc"})), ("label",)),
    "folder with weights cut": (model_folder(model_safetensors=b"\x10\0\0"), ("safetensors",)),
    "folder with tokenizer no Unicode": (
        model_folder(tokenizer_json=b"\xff\xfe{"), ("tokenizer",)),
}  # fmt: skip
