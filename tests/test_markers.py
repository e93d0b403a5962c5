"""The table of markers and the modules and folders that it names."""

import markers


def test_table_lists_existing_modules_and_folders() -> None:
    modules = {path.stem for path in markers.TESTS.rglob("test_*.py")}
    assert modules >= markers.BY_MODULE.keys()
    folders = {path.parent.name for path in markers.TESTS.rglob("test_*.py")}
    assert folders >= markers.BY_FOLDER.keys()
