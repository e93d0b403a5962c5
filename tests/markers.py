"""Set the markers ``slow``, ``cuda``, ``browser``, ``ray`` and ``tensorrt`` on tests.

They follow from folders, names of modules and fixtures, in one table. `pytest -m "not slow"` leaves
out the tests that take seconds each, and what they alone build.
"""

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
BY_FOLDER = {"cuda": {"cuda", "slow"}, "tensorrt": {"tensorrt", "slow"}}
BY_MODULE = {
    "test_page_in_a_browser": {"browser"},
    "test_tensorrt": {"tensorrt"},
    "test_tensorrt_builder": {"tensorrt"},
    "test_engine_file": {"tensorrt"},
    "test_engine_cache": {"tensorrt"},
    "test_engine_export": {"tensorrt"},
    "test_recognition": {"slow"},
    "test_chunked": {"slow"},
    "test_long_sums": {"slow"},
    "test_long_documents": {"slow"},
    "test_third_party": {"slow"},
    "test_interface": {"slow"},
    "test_load": {"slow"},
    "test_demo": {"slow"},
    "test_batch": {"slow"},
    "test_deployment": {"slow"},
}
BY_FIXTURE = {"ray": {"ray", "slow"}, "rtx_bundle": {"tensorrt"}}


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test by the table."""
    for item in items:
        names = BY_MODULE.get(item.path.stem, set[str]()).copy()
        for folder in item.path.relative_to(TESTS).parts[:-1]:
            names |= BY_FOLDER.get(folder, set())
        for fixture in getattr(item, "fixturenames", ()):
            names |= BY_FIXTURE.get(fixture, set())
        for name in sorted(names):
            item.add_marker(name)
