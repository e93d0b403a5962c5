"""Files of killed runs beside an output: the next run removes only those."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from commands import environment

from aftexport.system.files import replacing_file
from aftserve.batch.output_file import replacing

WRITING = """
import sys
from pathlib import Path
from aftserve.batch.output_file import replacing

with replacing(Path(sys.argv[1])) as aside:
    aside.write_text("half")
    print(flush=True)
    sys.stdin.read()
    aside.write_text("whole")
"""


@contextmanager
def writing(out: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Yield a process that has written half of its output and waits."""
    with subprocess.Popen(
        [sys.executable, "-c", WRITING, str(out)],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline()
            yield process
        finally:
            process.kill()


def beside(out: Path) -> list[Path]:
    return list(out.parent.glob(f".{out.name}.*"))


def test_next_run_removes_killed_runs_file(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with writing(out) as process:
        process.kill()
    (left,) = beside(out)
    assert left.read_text() == "half"
    with replacing(out) as aside:
        assert beside(out) == [aside]
        aside.write_text("answers")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"out.jsonl": "answers"}


def test_file_of_living_run_stays(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with writing(out) as process:
        (living,) = beside(out)
        with replacing(out) as aside:
            assert set(beside(out)) == {living, aside}
        process.communicate()
        assert process.returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]
    assert out.read_text() == "whole"


@pytest.mark.parametrize(
    "name",
    [".out.jsonl", ".out.jsonl.old", f".out.jsonl.{'g' * 16}", f".out-jsonl.{'0' * 16}",
     f".out.jsonl.{'0' * 17}", f".out.jsonl.{'1' * 16}", f".out.jsonl.{'2' * 16}"],
)  # fmt: skip
def test_unrelated_file_stays(name: str, tmp_path: Path) -> None:
    other = tmp_path / name
    if name.endswith("1" * 16):
        other.mkdir()
    elif name.endswith("2" * 16):
        (tmp_path / "elsewhere").write_text("unrelated")
        other.symlink_to("elsewhere")
    else:
        other.write_text("unrelated")
    with replacing(tmp_path / "out.jsonl"):
        pass
    assert os.path.lexists(other)


def test_shared_long_name_prevents_removal(tmp_path: Path) -> None:
    """The file beside an output has only the beginning of a long name."""
    names = [f"{'labels' * 6} {number}.jsonl" for number in range(2)]
    with replacing_file(tmp_path / names[0]) as other, replacing(tmp_path / names[1]):
        assert other.exists()


def test_file_removed_before_lock_is_recreated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    out, lock = tmp_path / "out.jsonl", fcntl.flock
    removed = list[Path]()

    def removing_first(file: object, how: int) -> None:
        if not removed:
            removed.extend(beside(out))
            removed[0].unlink()
        lock(file, how)  # type: ignore[arg-type]

    monkeypatch.setattr(fcntl, "flock", removing_first)
    with replacing(out) as aside:
        assert removed == [aside]
        aside.write_text("answers")
    assert out.read_text() == "answers"


def test_without_locks_nothing_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    def none(*_: object) -> None:
        raise OSError

    out = tmp_path / "out.jsonl"
    with writing(out) as process:
        process.kill()
    monkeypatch.setattr(fcntl, "flock", none)
    with replacing(out) as aside:
        assert len(beside(out)) == 2
        aside.write_text("answers")
    assert out.read_text() == "answers"
    assert len(beside(out)) == 1
