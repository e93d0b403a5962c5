import gc

import pytest

from aftexport.system.gc import collection_paused


def test_collection_stops_only_within_block() -> None:
    assert gc.isenabled()
    with collection_paused():
        with collection_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), collection_paused():
        _ = 1 / 0
    assert gc.isenabled()
