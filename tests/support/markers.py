"""Set the markers ``slow``, ``cuda``, ``browser``, ``ray`` and ``tensorrt`` on tests.

They follow from folders, names of modules and fixtures, in one table. `pytest -m "not slow"` leaves
out the tests that take seconds each, and what they alone build.
"""

from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
BY_FOLDER = {
    "cuda": {"cuda", "slow"},
    "tensorrt": {"tensorrt", "slow"},
    "examples": {"slow"},
    "docs": {"slow"},
    "wheels": {"slow"},
    "browser": {"browser", "slow"},
}
BY_MODULE = {
    "test_recognition": {"slow"},
    "test_look_alikes": {"slow"},
    "test_runner": {"slow"},
    "test_recurrent_models": {"slow"},
    "test_token_outputs": {"slow"},
    "test_long_documents": {"slow"},
    "test_models_in_runtimes": {"slow"},
    "test_third_party": {"slow"},
    "test_openapi": {"slow"},
    "test_load": {"slow"},
    "test_storm": {"slow"},
    "test_demo": {"slow"},
    "test_typing": {"slow"},
    "test_batch": {"slow"},
    "test_batch_refusals": {"slow"},
    "test_deployment": {"slow"},
    "test_monitor": {"slow"},
    "test_reload": {"slow"},
    "test_transformers_folders": {"slow"},
    "test_lifecycle": {"slow"},
    "test_idle": {"slow"},
    "test_kernel_target": {"slow"},
    "test_real_files": {"slow"},
    "test_extra_inputs": {"slow"},
    "test_connection_timeouts": {"slow"},
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
