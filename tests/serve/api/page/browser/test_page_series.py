"""Series of features on the page: their files, their plots and the marked evidence."""

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from input_models import FEATURES, MEAN, NAMES, SCALE
from page_driver import check_accessibility, drop, set_spread
from playwright.sync_api import Page, Request, Route, expect
from servers import Serve

MAX_TOKENS = 100_000
MIB = 1 << 20
MAX_STEPS = (MIB - 128) // (4 * FEATURES)
"""Steps of float32 that fit into a body of 1 MiB, with a header of 128 bytes."""
MARKED = """() => [...document.querySelectorAll("#plots canvas")].map(canvas => {
const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, 1).data;
const isMark = x => pixels[4 * x] === 255 && pixels[4 * x + 1] === 211;
return [...Array(canvas.width).keys()].filter(isMark);
})"""


@pytest.fixture(scope="module")
def address(feature_bundle: Path, serve: Serve) -> str:
    return serve(feature_bundle, "--max-tokens", str(MAX_TOKENS), "--max-array-mib", "1")


def measured(steps: int) -> Any:
    values = np.random.default_rng(steps).standard_normal((steps, FEATURES))
    return (values * SCALE + MEAN).astype(np.float32)


def saved(array: Any) -> bytes:
    file = BytesIO()
    np.save(file, array)
    return file.getvalue()


def send(page: Page, path: Path) -> Any:
    page.set_input_files("#file", path)
    return sent(page)


def sent(page: Page) -> Any:
    """Send the series that the page shows."""
    expect(page.locator("#plots canvas")).to_have_count(FEATURES)
    with page.expect_response("**/infer*") as response:
        page.click("#send")
    expect(page.locator("#answer")).to_be_visible()
    return response.value.json()


def test_csv_and_npy_have_one_answer(address: str, page: Page, tmp_path: Path) -> None:
    document = measured(3000)
    np.save(tmp_path / "a.npy", document)
    np.savetxt(tmp_path / "a.csv", document, delimiter=",", header=",".join(NAMES), comments="")
    set_spread(page, spread=False)
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


@pytest.mark.parametrize("kind", ["<f2", "<f8", ">f2", ">f4", ">f8"])
def test_other_floats_have_same_answer(kind: str, address: str, page: Page, tmp_path: Path) -> None:
    document = measured(300).astype(np.float16)  # which the other types hold exactly
    document[0] = [2.0**-20, -0.0, 65504, -65504]
    answers, captions = [], []
    page.goto(address)
    expect(page.locator("#text")).to_be_hidden()
    for number, dtype in enumerate(("<f4", kind)):
        np.save(tmp_path / f"{number}.npy", document.astype(np.dtype(dtype)))
        answers.append(send(page, tmp_path / f"{number}.npy")["scores"])
        captions.append(page.locator("#plots figcaption").all_inner_texts())
    assert answers[1] == pytest.approx(answers[0], abs=1e-6)
    assert captions[1] == captions[0]
    assert "65500" in captions[0][2]


def test_dropped_series_is_sent_unchanged(address: str, page: Page) -> None:
    content = saved(measured(700))
    page.goto(address)
    expect(page.locator("#text")).to_be_hidden()
    drop(page, "a.npy", content)
    expect(page.locator("#status")).to_have_text("Read a.npy: 700 steps.")
    with page.expect_request("**/infer*") as request:
        assert sent(page)["tokens_total"] == 700
    assert request.value.post_data_buffer == content


BAD: dict[str, tuple[str, bytes, str]] = {
    "no number": ("a.csv", b"1,2,3,4\n1,2,x,4\n", "Expected 4 numbers in row 2, got 1,2,x,4"),
    "other columns": (
        "a.csv",
        b"north,east,depth,speed\n1,2,3,4\n",
        "Expected the columns north, east, speed",
    ),
    "semicolons": ("a.csv", b"1,5;2,5;3;4\n", "commas between the columns, got semicolons"),
    "steps": ("a.csv", b"1,2,3,4\n" * (MAX_TOKENS + 1), "at most 100,000 steps, got 100,001"),
    "rows": (
        "a.csv",
        b"1,2,3,4\n" * (MAX_STEPS + 1),
        "at most 1,048,576 bytes of .npy, got 1,048,592",
    ),
    "outside float32": ("a.csv", b"1,2,3,1e39\n", "Expected 4 numbers in row 1"),
    "bytes": (
        "a.npy",
        saved(np.zeros((MAX_STEPS + 1, FEATURES), np.float32)),
        "at most 1,048,576 bytes of .npy, got 1,048,592",
    ),
    "text": ("a.npy", b"a,b\n" * 9, "Expected a file of numpy.save"),
    "version": ("a.npy", b"\x93NUMPY\x03\x00" + bytes(99), "Expected a file of numpy.save"),
    "integers": (
        "a.npy",
        saved(np.zeros((3, 4), np.int64)),
        "float64 [steps, 4] in C order, got <i8",
    ),
    "wide": ("a.npy", saved(np.zeros((3, 5))), "[steps, 4] in C order, got <f8 [3, 5]"),
    "cut": ("a.npy", saved(np.zeros((3, 4)))[:-1], "Expected 224 bytes by the header, got 223"),
    "NaN": (
        "a.npy",
        saved(np.array([[0, 0, 0, 0], [1, 2, np.nan, 4]])),
        "Expected finite float32 numbers, got NaN for speed of step 1",
    ),
    "large": ("a.npy", saved(np.array([[1e39, 0, 0, 0]])), "got 1e+39 for north of step 0"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_file_is_refused_before_upload(
    case: str, address: str, page: Page, tmp_path: Path
) -> None:
    """Neither the bad file is sent, nor the series before it."""
    name, content, said = BAD[case]
    (tmp_path / name).write_bytes(content)
    np.save(tmp_path / "good.npy", measured(10))
    requests = list[Request]()
    page.on("request", lambda one: requests.append(one) if "/infer" in one.url else None)
    page.goto(address)
    expect(page.locator("#text")).to_be_hidden()
    page.set_input_files("#file", tmp_path / "good.npy")
    expect(page.locator("#plots canvas")).to_have_count(FEATURES)
    page.set_input_files("#file", tmp_path / name)
    expect(page.locator("#problem")).to_contain_text(said)
    expect(page.locator("#plots")).to_be_hidden()
    page.click("#send")
    expect(page.locator("#problem")).to_contain_text("No series")
    assert requests == []


def test_largest_file_is_sent(address: str, page: Page, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", measured(MAX_STEPS))
    assert (tmp_path / "a.npy").stat().st_size == MIB
    page.goto(address)
    expect(page.locator("#text")).to_be_hidden()
    assert send(page, tmp_path / "a.npy")["tokens_total"] == MAX_STEPS


def describe_features(page: Page, names: list[str]) -> None:
    """Let the page show the features of another model, with other limits."""

    def answer(route: Route) -> None:
        info = route.fetch().json()
        info["features"]["names"] = names
        info["limits"] |= {"max_tokens": 1 << 20, "max_array_bytes": 64 * MIB}
        route.fulfill(json=info)

    page.route("**/info", answer)


def test_million_steps_are_drawn_soon(address: str, page: Page, tmp_path: Path) -> None:
    """A single high step is drawn too."""
    values = np.zeros((1_000_000, 2), np.float32)
    values[654_321, 1] = 9
    np.save(tmp_path / "a.npy", values)
    describe_features(page, ["calm", "peak"])
    page.goto(address)
    expect(page.locator("#series-hint")).to_contain_text("calm, peak")
    page.set_input_files("#file", tmp_path / "a.npy")
    read = "Read a.npy: 1,000,000 steps."
    expect(page.locator("#status")).to_have_text(read)
    expect(page.locator("#plots figcaption")).to_contain_text(["0 to 0", "0 to 9"])
    drawn = page.evaluate("""() => [...document.querySelectorAll("#plots canvas")].map(canvas => {
        const { data } = canvas.getContext("2d").getImageData(0, 5, canvas.width, 1);
        return [...Array(canvas.width).keys()].filter(x => data[4 * x + 3]);
    })""")
    assert drawn == [[], [654_321 * 720 // 1_000_000]]


def test_features_are_chosen(address: str, page: Page, tmp_path: Path) -> None:
    names = [f"f{number}" for number in range(40)]
    np.savetxt(tmp_path / "a.csv", np.arange(80.0).reshape(2, 40), delimiter=",")
    describe_features(page, names)
    page.goto(address)
    captions = page.locator("#plots figcaption")
    expect(page.locator("#channels option")).to_have_text(names)
    page.set_input_files("#file", tmp_path / "a.csv")
    expect(captions).to_contain_text(names[:16])
    page.select_option("#channels", ["f39", "f30"])
    expect(captions).to_have_text(["f3030 to 70", "f3939 to 79"])
    page.select_option("#channels", names[10:30])
    expect(captions).to_contain_text(names[10:26])
    check_accessibility(page)


def test_few_features_have_no_choice(address: str, page: Page, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", measured(10))
    page.goto(address)
    expect(page.locator("#text")).to_be_hidden()
    page.set_input_files("#file", tmp_path / "a.npy")
    expect(page.locator("#plots canvas")).to_have_count(FEATURES)
    expect(page.locator("#channels")).to_be_hidden()


def test_series_passes_accessibility_checks(address: str, page: Page, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", measured(500))
    page.goto(address)
    expect(page.locator("#text")).to_be_hidden()
    send(page, tmp_path / "a.npy")
    check_accessibility(page)
