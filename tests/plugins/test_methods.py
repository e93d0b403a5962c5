"""The choice of the method of products: its rule, its cache, and every method within the bounds."""

import fcntl
import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from encoder_forms import FORMS, Form

from aftexport.parity import TOLERANCES
from aftplugins.methods import METHOD_VARIABLE, MethodVariableError, choose

from .encoder_runner import BOUND, open_session
from .encoder_runner import run as run_encoder
from .runner import check, random_inputs, session
from .test_encoder_ops import error_of
from .test_encoder_ops import random_inputs as encoder_inputs

WIDTH = 64
SHOW = (
    "import sys; from aftplugins.methods import choose; "
    f"print(choose(sys.argv[1] if sys.argv[1:] else 'int8', {WIDTH}))"
)
SHOW_ALL = """
import json, sys
from dataclasses import asdict
from aftplugins.methods import choose
print(json.dumps([asdict(choose(*words)) for words in json.loads(sys.argv[1])]))
"""
FORK = """
import os, threading, time
from aftplugins.methods import choose
thread = threading.Thread(target=choose, args=("int8", 64))
thread.start()
time.sleep(0.3)
child = os.fork()
choice = choose("int8", 64)
if child == 0:
    os._exit(0 if choice is not None else 1)
thread.join()
assert os.waitpid(child, 0)[1] == 0
"""
REDUCED = ("bf16", "int8")
BF16 = ("fp32", "int16", "bf16", "amx_bf16")
BY_ERROR = (*BF16, "int8", "amx_int8")
"""All methods, the one with the smallest error first; those of BF16 keep bf16's bound."""


def all_choices(*products: tuple[str, int | None], **variables: str) -> list[dict[str, Any]]:
    """Return the choices of a new process, since a process keeps the rates that it knows."""
    command = [sys.executable, "-c", SHOW_ALL, json.dumps(products)]
    environment = os.environ | variables
    return json.loads(subprocess.check_output(command, timeout=120, env=environment))


@functools.cache
def usable() -> tuple[str, ...]:
    """Return the methods of this machine by their errors, at least fp32.

    Their rates are not kept: the import of this file must not measure into the user's cache.
    """
    with TemporaryDirectory() as folder:
        variables = {"AFTEXPORT_CACHE": folder, METHOD_VARIABLE: ""}
        (choice,) = all_choices(("int8", WIDTH), **variables)
    return tuple(sorted(choice["methods"], key=BY_ERROR.index))


@pytest.fixture(params=usable())
def forced(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv(METHOD_VARIABLE, request.param)
    session.cache_clear()
    yield request.param
    session.cache_clear()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(METHOD_VARIABLE, raising=False)
    if len(usable()) == 1:
        pytest.skip("one method on this machine: nothing to measure")
    monkeypatch.setenv("AFTEXPORT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "methods"


def start(*words: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", SHOW, *words]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=dict(os.environ)
    )


def shown(*words: str) -> str:
    """Return the choice of a new process, which prints nothing else."""
    process = start(*words)
    text = process.communicate(timeout=120)[0]
    assert process.returncode == 0, text
    assert text.startswith("MethodChoice(")
    assert text.count("\n") == 1
    return text


def only_file(cache: Path) -> Path:
    (file,) = cache.iterdir()
    return file


@pytest.mark.parametrize("precision", REDUCED)
@pytest.mark.parametrize("tested", FORMS, ids=str)
def test_forced_method_keeps_encoder_bound(tested: Form, precision: str, forced: str) -> None:
    for shape in ((2, 13, 48, 31), (1, 97, 256, 768)):
        inputs = encoder_inputs(tested, *shape)
        assert error_of(tested, inputs, precision=precision) <= BOUND[precision]


@pytest.mark.parametrize("precision", REDUCED)
@pytest.mark.parametrize("span", [1.0, 1.5, 4.0])
@pytest.mark.parametrize("op", ["AftFull", "CausalAftFull"])
def test_forced_method_keeps_aft_full_bound(
    op: str, span: float, precision: str, forced: str
) -> None:
    inputs = random_inputs(op, 2, 257, 40, lengths=[257, 85])
    inputs[3] = (np.random.default_rng(0).random((257, 257)) * span).astype(np.float32)
    check(op, inputs, bound=TOLERANCES[precision].bound, precision=precision)


@pytest.mark.skipif(len(usable()) == 1, reason="one method on this machine")
@pytest.mark.parametrize("constant", ["query_weight", "key_weight", "weight_out", "weight_up"])
def test_session_keeps_its_method(constant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are packed at every run have the method of those packed with the session."""
    is_query_key = constant in ("query_weight", "key_weight")
    op = "LayerNormQueryKeyValue" if is_query_key else "LayerNormFeedForward"
    inputs = encoder_inputs(Form(op), 2, 13, 64, 64)
    for first in usable():
        for second in usable():
            monkeypatch.setenv(METHOD_VARIABLE, first)
            mixed = open_session(op, inputs, [constant], precision="int8")
            monkeypatch.setenv(METHOD_VARIABLE, second)
            fed = {name: x for name, x in inputs.items() if name != constant}
            actual = np.concatenate(mixed.run(None, fed), axis=-1)
            monkeypatch.setenv(METHOD_VARIABLE, first)
            np.testing.assert_array_equal(actual, run_encoder(op, inputs, precision="int8"))


def test_forced_method_applies_within_its_bound(forced: str) -> None:
    for precision, methods in (("bf16", BF16), ("int8", BY_ERROR)):
        for width in (WIDTH, None):
            choice = choose(precision, width)
            assert choice is not None
            assert set(choice.methods) <= set(methods)
            if forced in methods:
                assert choice.methods[0] == forced
                assert choice.chosen_by in ("variable", "precision")


def test_each_precision_takes_coarsest_of_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(METHOD_VARIABLE, ",".join(usable()))
    for precision, methods in (("bf16", BF16), ("int8", BY_ERROR)):
        for width in (WIDTH, None):
            choice = choose(precision, width)
            assert choice is not None
            allowed = [method for method in usable() if method in methods]
            assert choice.methods[0] == allowed[-1]


def test_unknown_method_lists_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    known = ", ".join(sorted(usable()))
    monkeypatch.setenv(METHOD_VARIABLE, "int4")
    with pytest.raises(MethodVariableError, match=r'AFTEXPORT_METHOD is "int4".* fp32') as caught:
        choose("int8", WIDTH)
    assert ", ".join(sorted(str(caught.value).rpartition("are ")[2].split(", "))) == known


def test_unknown_precision_is_refused() -> None:
    with pytest.raises(RuntimeError, match="expected the precision fp32, fp16, bf16 or int8, got"):
        choose("int4", WIDTH)


def test_text_of_any_length_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = choose("int8", WIDTH)
    monkeypatch.setattr("aftplugins.methods._TEXT_BYTES", 10)
    assert choose("int8", WIDTH) == whole


def test_full_precision_has_one_method() -> None:
    for precision in ("fp32", "fp16"):
        choice = choose(precision, WIDTH)
        assert choice is not None
        assert choice.methods == ("fp32",)
        assert choice.rates == {}


def test_choice_follows_rule(cache: Path) -> None:
    """The fastest within the bound; within a tenth of it the one with the smallest error."""
    products = [(precision, width) for precision in REDUCED for width in (16, 90, 300, None)]
    for choice in all_choices(*products):
        if choice["chosen_by"] == "precision":
            continue  # one method, which is not measured
        rates = {name: round(rate * 1000) for name, rate in choice["rates"].items()}
        fastest = max(rates[method] for method in choice["methods"])
        near = [m for m in choice["methods"] if 11 * rates[m] >= 10 * fastest]
        assert choice["methods"][0] == min(near, key=BY_ERROR.index)


def test_fork_during_measurement_leaves_child_free(cache: Path) -> None:
    """The parent waits for the lock, and so measures, while it forks."""
    cache.mkdir(parents=True)
    folder = os.open(cache, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        subprocess.run([sys.executable, "-W", "ignore", "-c", FORK], timeout=60, check=True)
    finally:
        os.close(folder)


def test_shown_rates_are_whole_numbers_of_file(cache: Path) -> None:
    """No rounding, and no decimal point, for which the locale of a program may have a comma."""
    (choice,) = all_choices(("int8", WIDTH))
    text = only_file(cache).read_text()
    for method, rate in choice["rates"].items():
        assert f"\n{method} {round(rate * 1000)}\n" in text


def test_later_process_reads_cached_rates(cache: Path) -> None:
    """A process that measured would find other rates."""
    first = shown()
    assert "kept=True" in first
    file = only_file(cache)
    text = file.read_text()
    *head, last, end = text.splitlines()
    name, _, rate = last.partition(" ")
    changed = "\n".join([*head, f"{name} {int(rate) + 7_000_000}", end, ""])
    file.write_text(changed)
    assert f"'{name}': {(int(rate) + 7_000_000) / 1000}" in shown()
    assert file.read_text() == changed
    assert f"methods=('{name}'" in shown("int8")


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: b"",
        lambda text: text[:-5],
        lambda text: text + b"more\n",
        lambda text: text.replace(b"fp32 ", b"fp32 -"),
        lambda text: text.replace(b"fp32 ", b"fp32 0"),
        lambda text: text.replace(b"processor ", b"processor other "),
        lambda text: text.replace(b"format 1", b"format 2"),
        lambda text: b"\x00\xff" * 50_000,
    ],
)
def test_damaged_cache_is_replaced(cache: Path, damage) -> None:  # type: ignore[no-untyped-def]
    shown()
    file = only_file(cache)
    damaged = damage(file.read_bytes())
    file.write_bytes(damaged)
    again = shown()
    assert "kept=True" in again
    assert only_file(cache).read_bytes() != damaged
    assert shown() == again


def test_folder_in_place_of_cache_file_is_ignored(cache: Path) -> None:
    shown()
    file = only_file(cache)
    file.unlink()
    file.mkdir()
    assert "kept=False" in shown()
    assert list(cache.iterdir()) == [file]


def test_unwritable_cache_keeps_rates_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AFTEXPORT_CACHE", str(tmp_path / "file" / "cache"))
    assert "kept=False" in shown()
    assert (tmp_path / "file").read_text() == ""


@pytest.mark.parametrize("damaged", [False, True])
def test_concurrent_first_starts_agree(cache: Path, damaged: bool) -> None:
    if damaged:
        shown()
        only_file(cache).write_text("damaged")
    processes = [start() for _ in range(20)]
    texts = {process.communicate(timeout=300)[0] for process in processes}
    assert all(process.returncode == 0 for process in processes)
    assert len(texts) == 1
    assert "kept=True" in next(iter(texts))
    only_file(cache)  # and no temporary file
