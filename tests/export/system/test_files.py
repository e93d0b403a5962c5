import json
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiny_models
import torch
from bundles import resealed
from commands import Capture, assert_refused, listing, run_here

from aftexport.bundle.bundle import CHUNKED, Bundle
from aftexport.checkpoint import load
from aftexport.chunked.runner import ChunkedModel
from aftexport.errors import CheckpointError, EngineError
from aftexport.system.files import (
    aside_folder,
    move_into_place,
    replacing_file,
    sha256,
    unstored_member,
    write_json,
)


class Stop(Exception):  # noqa: N818
    pass


def replace_half(path: Path) -> None:
    with replacing_file(path) as aside:
        aside.write_text("half")
        raise Stop


def replace_whole(path: Path, content: str) -> None:
    with replacing_file(path) as aside:
        aside.write_text(content)


def fill_half(folder: Path) -> None:
    with aside_folder(folder) as aside:
        (aside / "deep").mkdir()
        (aside / "deep" / "file").write_text("half")
        raise Stop


def fill_and_move(folder: Path, content: str) -> None:
    with aside_folder(folder) as aside:
        (aside / content).write_text(content)
        move_into_place(aside, folder)


def test_file_is_replaced_when_complete(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    with replacing_file(path) as aside:
        aside.write_text("first")
        assert not path.exists()
    with pytest.raises(Stop):
        replace_half(path)
    assert path.read_text() == "first"
    assert listing(path.parent).keys() == {"file"}


def test_link_target_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("elsewhere/file")
    replace_whole(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "elsewhere" / "file").read_text() == "new"


@pytest.mark.parametrize("write", [replace_whole, fill_and_move])
def test_replacement_reaches_disk_first(
    write: Callable[[Path, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "place"
    written: list[dict[str, str]] = []
    monkeypatch.setattr(os, "fsync", lambda file: written.append(listing(path.parent)))
    write(path, "first")
    before = listing(path.parent)
    assert not written
    write(path, "second")
    (beside,) = written
    assert {name: beside[name] for name in before} == before
    assert len(beside) > len(before)


def test_replaced_file_has_default_permissions(tmp_path: Path) -> None:
    (tmp_path / "usual").touch()
    replace_whole(tmp_path / "file", "new")
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_moved_folder_has_default_permissions(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        (tmp_path / "usual").mkdir()
        with aside_folder(tmp_path / "folder") as aside:
            move_into_place(aside, tmp_path / "folder")
    finally:
        os.umask(before)
    assert (tmp_path / "folder").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_replacement_never_changes_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The umask belongs to the whole process, so other threads would see the change."""

    def fail(mask: int) -> int:
        raise AssertionError("the mask is the whole process's")

    monkeypatch.setattr(os, "umask", fail)
    replace_whole(tmp_path / "file", "new")
    fill_and_move(tmp_path / "folder", "new")


@pytest.mark.parametrize("place", ["folder", "a/b/folder"])
def test_failing_block_leaves_no_folder(place: str, tmp_path: Path) -> None:
    with pytest.raises(Stop):
        fill_half(tmp_path / place)
    assert not listing(tmp_path)


def test_folder_replaces_another_whole(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    fill_and_move(target, "old")
    fill_and_move(target, "new")
    assert listing(tmp_path).keys() == {"folder", "folder/new"}


def test_failed_move_restores_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "folder"
    fill_and_move(target, "old")
    rename = Path.rename

    def failing(self: Path, other: Path) -> Path:
        if (self / "new").exists():
            raise OSError("disk full")
        return rename(self, other)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="disk full"):
        fill_and_move(target, "new")
    assert listing(tmp_path).keys() == {"folder", "folder/old"}


def test_a_digest_is_of_the_bytes(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    assert sha256(tmp_path / "file").startswith("ba7816bf")


def test_pipe_is_written_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with replacing_file(pipe) as place:
            place.write_text("content")
        assert os.read(reader, 100) == b"content"
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_json_sorts_all_but_ordered_mappings(tmp_path: Path) -> None:
    number = np.float32(1.5)
    content = {"b": {"z": "é", "a": ({"d": number, "c": 2},)}, "a": {"z": {"y": 1, "x": 2}, "b": 0}}
    write_json(tmp_path / "file.json", content, ordered=["a"])
    read = json.loads((tmp_path / "file.json").read_text("utf-8"))
    assert list(read) == ["a", "b"]
    assert list(read["a"]) == ["z", "b"]
    assert list(read["a"]["z"]) == ["x", "y"]
    assert list(read["b"]) == ["a", "z"]
    assert list(read["b"]["a"][0].items()) == [("c", 2), ("d", 1.5)]


Change = Callable[[Path], object]
BAD: dict[str, tuple[Change, str]] = {
    "compressed": (lambda path: rewritten(path, "compressed"), "in it is compressed"),
    "twice": (lambda path: rewritten(path, "twice"), "is in it twice"),
    "nested": (lambda path: nested(path, 40, 4000), "and its members up to"),
}


def overstating(name: str) -> Change:
    return lambda path: overstated(path, name, 3_000_000_000)


def test_stored_members_are_accepted(bundle_folder: Path, checkpoint_file: Path) -> None:
    for path in (bundle_folder / CHUNKED, checkpoint_file):
        with zipfile.ZipFile(path) as archive:
            assert unstored_member(archive, path.stat().st_size) is None


@pytest.mark.parametrize("kind", [*BAD, "overstated"])
def test_chunked_archive_is_refused(kind: str, bundle_copy: Path, capsys: Capture) -> None:
    plan = Bundle.open(bundle_copy).manifest.chunked
    assert plan is not None
    change, reason = BAD.get(kind) or (overstating("pool.onnx"), "pool.onnx have 30")
    change(bundle_copy / CHUNKED)
    with pytest.raises(EngineError, match=f"chunked.zip: .*{reason}"):
        ChunkedModel(bundle_copy / CHUNKED, plan)
    if kind == "compressed":
        refused = run_here(["verify", resealed(bundle_copy)], capsys)
        assert_refused(refused, "chunked.zip", "is compressed")


def test_graph_over_message_limit_is_unread(
    bundle_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Bundle.open(bundle_copy).manifest.chunked
    assert plan is not None
    model = ChunkedModel(bundle_copy / CHUNKED, plan)
    monkeypatch.setattr("aftexport.chunked.opened_archive._MAX_GRAPH_BYTES", 1000)
    with pytest.raises(EngineError, match=r"0\.reduce must have at most 1000 bytes, got \d+"):
        model.run(np.arange(3))


@pytest.mark.parametrize("kind", ["compressed", "twice", "overstated"])
def test_checkpoint_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save(tiny_models.Bag().state_dict(), path)
    change, reason = BAD.get(kind) or (overstating("model/data/0"), "data/0 have 30")
    change(path)
    with pytest.raises(CheckpointError, match=reason):
        load(path, factory="tiny_models:Bag")


@pytest.mark.parametrize("size", [1, 100, 5000])
def test_cut_archive_is_refused(size: int, bundle_copy: Path) -> None:
    plan = Bundle.open(bundle_copy).manifest.chunked
    assert plan is not None
    os.truncate(bundle_copy / CHUNKED, size)
    with pytest.raises(EngineError, match=r"chunked\.zip"):
        ChunkedModel(bundle_copy / CHUNKED, plan)


_DIRECTORY = b"PK\1\2"


def overstated(path: Path, name: str, size: int) -> Path:
    """Writes another size of a stored member into the directory of an archive."""
    content = bytearray(path.read_bytes())
    place = content.rindex(name.encode()) - 46
    assert content[place : place + 4] == _DIRECTORY
    struct.pack_into("<II", content, place + 20, size, size)
    path.write_bytes(content)
    return path


def rewritten(path: Path, kind: str) -> Path:
    """Writes the members of an archive otherwise: ``compressed``, or one of them ``twice``."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    how = zipfile.ZIP_DEFLATED if kind == "compressed" else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", how) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
        if kind == "twice":
            archive.infolist().append(archive.infolist()[-1])
            archive.filelist = archive.infolist()
    return path


def nested(path: Path, depth: int, size: int) -> Path:
    """Writes an archive whose members overlap: each holds all that follow it."""
    tail = bytes(size)
    entries = []
    for number in reversed(range(depth)):
        name = f"{number}.onnx".encode()
        crc, length = zipfile.crc32(tail), len(tail)
        fields = (10, 0, 0, 0, 0x21, crc, length, length, len(name), 0)
        tail = struct.pack("<4s5H3L2H", b"PK\3\4", *fields) + name + tail
        entries.append((name, fields, len(tail)))
    directory = b""
    for name, fields, length in entries:
        offset = len(tail) - length
        entry = struct.pack("<4s6H3L5H2L", _DIRECTORY, 10, *fields, 0, 0, 0, 0, offset)
        directory += entry + name
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, depth, depth, len(directory), len(tail), 0)
    path.write_bytes(tail + directory + end)
    return path
