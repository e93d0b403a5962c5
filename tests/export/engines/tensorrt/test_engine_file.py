import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import engines
import pytest
from engines import WANTED

from aftexport.engines.cuda import Device
from aftexport.engines.tensorrt.engine_file import (
    VARIABLE,
    EngineCache,
    EngineFile,
    EngineRecord,
    EngineRequirements,
    engine_cache,
)
from aftexport.engines.tensorrt.settings import build_settings
from aftexport.errors import EngineError
from aftexport.options import EngineOptions

A10 = Device("NVIDIA A10", 86)
TRT = replace(
    WANTED,
    device=A10,
    settings=build_settings("trt", EngineOptions(), precision="fp16", max_tokens=300),
)


@pytest.fixture
def file(tmp_path: Path) -> EngineFile:
    return EngineFile(tmp_path / "engine", tmp_path / "record")


@pytest.mark.parametrize("wanted", [WANTED, TRT])
def test_fitting_engine_is_read(file: EngineFile, wanted: EngineRequirements) -> None:
    record = engines.record(wanted=wanted)
    file.write(b"engine", record)
    assert file.read(wanted) == (b"engine", record)


OTHERS = {
    "another version": (WANTED, {"version": "1.8"}, "by TensorRT-RTX 1.7, this machine has 1.8"),
    "another model": (WANTED, {"model": "other"}, "another model.onnx"),
    "another precision": (WANTED, {"precision": "bf16"}, "other settings"),
    "other settings": (
        WANTED,
        {"settings": WANTED.settings.model_copy(update={"max_batch": 9})},
        "other settings",
    ),
    "another runtime": (WANTED, {"settings": TRT.settings}, "for TensorRT-RTX, not TensorRT"),
    "plugins": (WANTED, {"plugins": "digest"}, "plugins that differ"),
    "a GPU outside its list": (
        WANTED,
        {"device": Device("NVIDIA H100", 90)},
        "80, 86, 89, 120, this machine has NVIDIA H100, compute capability 9.0",
    ),
    "another GPU": (
        TRT,
        {"device": Device("NVIDIA A40", 86)},
        "on NVIDIA A10, compute capability 8.6, this machine has NVIDIA A40",
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_unfit_engine_is_never_used(kind: str, file: EngineFile) -> None:
    built_for, change, reason = OTHERS[kind]
    file.write(b"engine", engines.record(wanted=built_for))
    with pytest.raises(EngineError, match=reason) as caught:
        file.read(replace(built_for, **change))
    assert "--rebuild" in caught.value.remedy


def test_portable_engine_runs_on_listed_gpus(file: EngineFile) -> None:
    file.write(b"engine", engines.record())
    assert file.read(replace(WANTED, device=A10))[0] == b"engine"


DAMAGES: dict[str, tuple[Callable[[EngineFile], object], str]] = {
    "a bit": (lambda file: file.engine.write_bytes(b"engjne"), "changed or damaged"),
    "the end missing": (lambda file: file.engine.write_bytes(b"eng"), "changed or damaged"),
    "the engine missing": (lambda file: file.engine.unlink(), "No such file"),
    "the record missing": (lambda file: file.record.unlink(), "No such file"),
    "the record empty": (lambda file: file.record.write_text(""), "not a record"),
    "the record of other fields": (lambda file: file.record.write_text("{}"), "not a record"),
    "the record binary": (lambda file: file.record.write_bytes(b"\xff"), "not a record"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_engine_error_names_reason(kind: str, file: EngineFile) -> None:
    damage, reason = DAMAGES[kind]
    file.write(b"engine", engines.record())
    damage(file)
    with pytest.raises(EngineError, match=reason):
        file.read(WANTED)


@pytest.mark.parametrize("place", ["engine", "record"])
@pytest.mark.parametrize("kind", ["a folder", "a device", "too large"])
def test_unbounded_files_are_not_read(kind: str, place: str, file: EngineFile) -> None:
    file.write(b"engine", engines.record(wanted=WANTED))
    path: Path = getattr(file, place)
    path.unlink()
    match kind:
        case "a folder":
            path.mkdir()
        case "a device":
            path.symlink_to("/dev/zero")
        case _:
            path.touch()
            os.truncate(path, (1 << 37) + 1)
    with pytest.raises(EngineError, match=f"{place} (is not a file|must .*got 137438953473)"):
        file.read(WANTED)


@pytest.fixture
def cache(tmp_path: Path) -> EngineCache:
    return EngineCache(tmp_path / "engines")


def test_variable_sets_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "here"))
    assert engine_cache("0" * 64).folder.is_relative_to(tmp_path / "here")
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "there"))
    assert engine_cache("0" * 64).folder.is_relative_to(tmp_path / "there" / "aftexport")


def test_engines_of_different_settings_coexist(cache: EngineCache) -> None:
    places = [WANTED, replace(WANTED, version="1.8"), replace(WANTED, plugins="digest")]
    for index, wanted in enumerate(places):
        content = bytes([index])
        cache.put(wanted, content, engines.record(content, wanted))
    for index, wanted in enumerate(places):
        assert cache.entry(wanted).read(wanted)[0] == bytes([index])
        assert len(cache.others(wanted)) == 2


def test_half_written_engine_replaces_nothing(
    cache: EngineCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.put(WANTED, b"good", engines.record(b"good"))

    def run_out_of_space(self: EngineFile, engine: bytes, record: EngineRecord) -> None:
        self.engine.write_bytes(engine[:2])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(EngineFile, "write", run_out_of_space)
        with pytest.raises(EngineError, match="No space left"):
            cache.put(WANTED, b"better", engines.record(b"better"))
    assert cache.entry(WANTED).read(WANTED)[0] == b"good"
    assert [path.name for path in cache.folder.iterdir()] == [
        cache.entry(WANTED).engine.parent.name
    ]


def test_one_builds_while_the_others_wait(cache: EngineCache) -> None:
    waiting, order = threading.Event(), []

    def second() -> None:
        with cache.locked(WANTED, waiting.set):
            order.append("second")

    with cache.locked(WANTED, pytest.fail):
        thread = threading.Thread(target=second)
        thread.start()
        assert waiting.wait(10)
        with cache.locked(replace(WANTED, version="1.8"), pytest.fail):
            order.append("first")
    thread.join(10)
    assert order == ["first", "second"]


def test_unwritable_cache_error_names_variable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = EngineCache(tmp_path / "file" / "engines")
    with pytest.raises(EngineError, match=VARIABLE), cache.locked(WANTED, pytest.fail):
        pass
    with pytest.raises(EngineError, match=VARIABLE):
        cache.put(WANTED, b"engine", engines.record())
