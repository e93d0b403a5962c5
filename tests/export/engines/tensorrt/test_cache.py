import threading
from dataclasses import replace
from pathlib import Path

import engines
import pytest
from engines import WANTED

from aftexport.engines.tensorrt.cache import VARIABLE, EngineCache, engine_cache
from aftexport.engines.tensorrt.engine_file import EngineFile, EngineRecord
from aftexport.errors import EngineError


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
