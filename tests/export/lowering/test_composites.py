"""torch looks up its composite operators once for an export."""

import threading

import pytest
import tiny_models
import torch
from torch._export import utils

from aftexport.capture.capture import capture
from aftexport.lowering.to_onnx import lower
from aftexport.system.internals.torch_composites import list_composites_once


def test_operators_are_listed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, look_up = [], utils._materialize_cpp_cia_ops

    def count() -> None:
        calls.append(1)
        look_up()

    monkeypatch.setattr(utils, "_materialize_cpp_cia_ops", count)
    program = capture(tiny_models.Bag())
    calls.clear()
    lower(program)
    assert len(calls) == 1
    assert utils._materialize_cpp_cia_ops is count


def test_operator_of_the_block_is_listed() -> None:
    """The list has an operator that is registered after torch has listed the others."""
    with list_composites_once(), torch.library._scoped_library("aft_test_list", "DEF") as library:
        utils._collect_all_valid_cia_ops()
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x + x, "CompositeImplicitAutograd")
        assert torch.ops.aft_test_list.twice.default in utils._collect_all_valid_cia_ops()


def test_waiting_thread_restores_function() -> None:
    """The second thread waits for the first one, and both restore the function of torch."""
    original = utils._materialize_cpp_cia_ops
    is_first_in, is_second_there = threading.Event(), threading.Event()

    def first() -> None:
        with list_composites_once():
            is_first_in.set()
            is_second_there.wait(60)
            second_thread.join(0.2)  # it now waits for the lock

    def second() -> None:
        is_second_there.set()
        with list_composites_once():
            pass

    first_thread, second_thread = (threading.Thread(target=run) for run in (first, second))
    first_thread.start()
    assert is_first_in.wait(60)
    second_thread.start()
    first_thread.join()
    second_thread.join()
    assert utils._materialize_cpp_cia_ops is original
