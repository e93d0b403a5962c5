"""Changes of the file of API keys while the server runs, and folders that expose it."""

import json
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from clients import BODY, eventually, head, http, raw_connection, response
from servers import serving

from aftserve.api.api_keys import Key, Keys, exposures, make_key
from aftserve.errors import BusyError

DIGEST = "a" * 64


@dataclass
class Guarded:
    """A server with API keys, its file of keys and its log."""

    address: str
    process: "subprocess.Popen[bytes]"
    file: Path
    log: Path

    def status(self, key: str, path: str = "/info") -> int:
        return http.get(self.address + path, headers={"X-API-Key": key}).status_code

    def messages(self, level: str) -> list[str]:
        """Return the messages about keys; the last line may be incomplete."""
        complete, _, _ = self.log.read_text("utf-8").rpartition("\n")
        lines = [json.loads(line) for line in complete.splitlines() if line.startswith("{")]
        found = [one for one in lines if one["logger"] == "aftserve.keys"]
        return [one["message"] for one in found if one["level"] == level]

    def wait_for_more(self, level: str, change: Callable[[], object]) -> str:
        """Make a change, and return the next message of a level."""
        before = len(self.messages(level))
        change()
        eventually(lambda: len(self.messages(level)) > before, f"a line of {level}")
        return self.messages(level)[before]


@pytest.fixture(scope="module")
def guarded(bundle_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("keys")
    file, log = folder / "keys.toml", folder / "log"
    file.write_text(make_key("first", None)[1])
    options = ("--api-keys", str(file), "--log-format", "json")
    with serving(bundle_folder, log, *options) as (address, process):
        yield Guarded(address, process, file, log)
    assert "Traceback" not in log.read_text("utf-8")


def write(file: Path, *sections: str) -> None:
    """Replace a file as an editor does, by a rename."""
    other = file.with_name("new")
    other.write_text("\n\n".join(sections))
    other.chmod(0o600)
    other.replace(file)


@pytest.mark.slow
def test_changed_file_takes_effect(guarded: Guarded) -> None:
    (old, one), (new, other) = make_key("old", None), make_key("new", None, admin=True)
    message = guarded.wait_for_more("info", lambda: write(guarded.file, one))
    assert message == "using the API keys of old"
    assert (guarded.status(old), guarded.status(new)) == (200, 401)
    guarded.wait_for_more("info", lambda: guarded.file.write_text(other))  # in place
    assert (guarded.status(old), guarded.status(new)) == (401, 200)
    reload = http.post(f"{guarded.address}/reload", headers={"X-API-Key": new})
    assert reload.status_code == 200


def test_accepted_request_outlives_its_key(guarded: Guarded) -> None:
    (old, one), (_, other) = make_key("old", None), make_key("new", None)
    guarded.wait_for_more("info", lambda: write(guarded.file, one))
    with raw_connection(guarded.address) as connection:
        connection.sendall(head(len(BODY), f"X-API-Key: {old}") + BODY[:5])
        eventually(lambda: guarded.status(old) == 200, "the server has the first part")
        guarded.wait_for_more("info", lambda: write(guarded.file, other))
        assert guarded.status(old) == 401
        connection.sendall(BODY[5:])
        status, _ = response(connection)
    assert status == 200


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "the file has no keys"),
        ("[alice", "end of a table"),
        ("a = " + "[" * 5000, "recursion depth"),
        ("[alice]\nsha256 = 'secret'", "alice.sha256"),
        (None, "No such file"),
    ],
)
def test_broken_file_keeps_keys(content: str | None, reason: str, guarded: Guarded) -> None:
    key, section = make_key("kept", None)
    guarded.wait_for_more("info", lambda: write(guarded.file, section))

    def damage() -> None:
        if content is None:
            guarded.file.unlink()
        else:
            write(guarded.file, content)

    message = guarded.wait_for_more("error", damage)
    assert message.startswith("the previous API keys stay in use: --api-keys")
    assert reason in message
    assert guarded.status(key) == 200
    # The same keys in a good file are used again.
    guarded.wait_for_more("info", lambda: write(guarded.file, section))
    assert guarded.status(key) == 200


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="the system has no SIGHUP")
def test_signal_reads_keys_again(guarded: Guarded) -> None:
    _, section = make_key("signal", None)
    guarded.wait_for_more("info", lambda: write(guarded.file, section))
    message = guarded.wait_for_more("info", lambda: os.kill(guarded.process.pid, signal.SIGHUP))
    assert message == "using the API keys of signal"


def test_rates_hold_for_concurrent_requests(guarded: Guarded) -> None:
    (one, first), (other, second) = make_key("one", "20/hour"), make_key("other", "10/hour")
    guarded.wait_for_more("info", lambda: write(guarded.file, first, second))
    with ThreadPoolExecutor(12) as pool:
        pending = [pool.submit(guarded.status, key) for key in [one, other] * 30]
        codes = [answer.result() for answer in pending]
    assert Counter(codes[::2]) == {200: 20, 429: 10}
    assert Counter(codes[1::2]) == {200: 10, 429: 20}


def test_replaced_keys_keep_counted_requests() -> None:
    def keys(**rates: str | None) -> Keys:
        return Keys({name: Key(sha256=DIGEST, rate=rate) for name, rate in rates.items()})

    used = keys(same="1/hour", raised="1/hour", freed="1/hour")
    for name in ("same", "raised", "freed"):
        used.count(name)
    used.replace(keys(same="1/hour", raised="2/hour", freed=None, added="1/hour"))
    for name in ("raised", "freed", "added"):
        used.count(name)
    for name in ("same", "added"):
        with pytest.raises(BusyError):
            used.count(name)
    used.count("freed")


pytestmark = pytest.mark.skipif(
    os.name != "posix", reason="permission bits do not control access there"
)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    file = tmp_path / "keys.toml"
    file.touch(0o600)
    return file


def test_private_file_is_not_exposed(keys: Path) -> None:
    assert list(exposures(keys)) == []


def test_open_folder_between_links_is_named(keys: Path, tmp_path: Path) -> None:
    """Any user could point the second link to another file."""
    between = tmp_path / "between"
    between.mkdir()
    between.chmod(0o777)
    (between / "second").symlink_to(keys)
    (tmp_path / "first").symlink_to(between / "second")
    (exposure,) = exposures(tmp_path / "first")
    assert f"every user may write the folder {between}" in exposure


def test_relative_links_are_followed(keys: Path, tmp_path: Path) -> None:
    between = tmp_path / "between"
    between.mkdir()
    between.chmod(0o777)
    (between / "second").symlink_to("../keys.toml")
    (tmp_path / "first").symlink_to("between/second")
    assert any(str(between) in exposure for exposure in exposures(tmp_path / "first"))
