"""A cache of method rates for the tests of the kernels, apart from the user's own."""

from collections.abc import Iterator

import pytest

from aftexport.engines.tensorrt.engine_file import VARIABLE


@pytest.fixture(scope="package", autouse=True)
def separate_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(tmp_path_factory.mktemp("cache")))
        yield
