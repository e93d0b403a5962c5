"""Series of features on the page: their files, their plots and the marked evidence."""

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from feature_models import FEATURES, MEAN, NAMES, SCALE
from playwright.sync_api import Page, expect
from servers import serving

AXE = files("axe_core_python").joinpath("axe.min.js")
MAX_TOKENS = 100_000
MARKED = """() => [...document.querySelectorAll("#plots canvas")].map(canvas => {
const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, 1).data;
const isMark = x => pixels[4 * x] === 255 && pixels[4 * x + 1] === 211;
return [...Array(canvas.width).keys()].filter(isMark);
})"""


@pytest.fixture(scope="module")
def address(feature_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("series") / "log"
    with serving(feature_bundle, log, "--max-tokens", str(MAX_TOKENS)) as (address, _):
        yield address


def measured(steps: int) -> Any:
    values = np.random.default_rng(steps).standard_normal((steps, FEATURES))
    return (values * SCALE + MEAN).astype(np.float32)


def send(page: Page, path: Path) -> Any:
    page.set_input_files("#file", path)
    expect(page.locator("#plots canvas")).to_have_count(FEATURES)
    with page.expect_response("**/infer*") as response:
        page.click("#send")
    expect(page.locator("#answer")).to_be_visible()
    return response.value.json()


def test_csv_and_npy_have_one_answer(address: str, page: Page, tmp_path: Path) -> None:
    document = measured(3000)
    np.save(tmp_path / "a.npy", document)
    np.savetxt(tmp_path / "a.csv", document, delimiter=",", header=",".join(NAMES), comments="")
    page.goto(address)
    expect(page.locator("#text")).to_be_hidden()
    first = send(page, tmp_path / "a.npy")
    expect(page.locator("#label")).to_contain_text(first["label"])
    expect(page.locator("#plots figcaption")).to_contain_text([*NAMES])
    second = send(page, tmp_path / "a.csv")
    assert second["scores"] == pytest.approx(first["scores"], abs=1e-6)
    spans = second["evidence"]["spans"]
    assert spans
    expect(page.locator("#spans tbody tr")).to_have_count(len(spans))
    expect(page.locator("#spans tbody tr").first).to_contain_text(
        f"Steps {spans[0]['start_token']}"
    )
    columns = page.evaluate(MARKED)
    wanted = [int(span["start_token"] / 3000 * 720) for span in spans]
    assert {*wanted} <= {x + d for marks in columns for x in marks for d in (0, -1)}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", b"1,2,3,4\n1,2,x,4\n", "Expected 4 numbers in row 2, got 1,2,x,4"),
        ("a.csv", b"north,east,depth,speed\n1,2,3,4\n", "Expected the columns north, east, speed"),
        ("a.csv", b"1,2,3,4\n" * (MAX_TOKENS + 1), "at most 100,000 steps, got 100,001"),
        ("a.npy", b"a,b\n" * 9, "Expected a file of numpy.save"),
    ],
)
def test_bad_file_is_refused_before_upload(
    name: str, content: bytes, said: str, address: str, page: Page, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    page.goto(address)
    expect(page.locator("#text")).to_be_hidden()
    page.set_input_files("#file", tmp_path / name)
    expect(page.locator("#problem")).to_contain_text(said)


def test_series_passes_accessibility_checks(address: str, page: Page, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", measured(500))
    page.goto(address)
    expect(page.locator("#text")).to_be_hidden()
    page.evaluate(AXE.read_text("utf-8"))
    send(page, tmp_path / "a.npy")
    found = page.evaluate("axe.run()")
    assert [(one["id"], one["nodes"]) for one in found["violations"]] == []
