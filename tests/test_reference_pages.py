"""The generated parts of the documentation are current.

The tests in ``tests/docs`` run the pages, so ``make test`` leaves them out.
"""

import pytest
from docs.pages import PAGES
from docs.reference import MARKED, filled

MARKS = {page: len(MARKED.findall(text)) for page, text in PAGES.items() if MARKED.search(text)}


@pytest.mark.parametrize("page", MARKS)
def test_generated_parts_are_current(page: str) -> None:
    assert filled(PAGES[page]) == PAGES[page], f"{page}: run make reference"


def test_every_generated_part_has_an_end() -> None:
    starts = {page: text.count("<!-- reference: ") for page, text in PAGES.items()}
    assert {page: count for page, count in starts.items() if count} == MARKS
