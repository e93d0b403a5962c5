"""After a change of any manifest field, the bundle runs or an error gives the reason."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aftexport.bundle.bundle import CHUNKED, Bundle
from aftexport.chunked.runner import ChunkedModel
from aftexport.errors import AftexportError, BundleError

DELETED = object()
VALUES: tuple[Any, ...] = (DELETED, [], {}, -1, 0, 10**12, "x", None, True, 0.5, [[]], {"x": {}})
Place = tuple[str | int, ...]


def places(content: Any, place: Place = ()) -> Iterator[Place]:
    """Return the place of each value; lists and objects come before their contents."""
    if place:
        yield place
    if isinstance(content, dict):
        for name in content:
            yield from places(content[name], (*place, name))
    elif isinstance(content, list):
        for index in range(min(len(content), 2)):
            yield from places(content[index], (*place, index))


def changed(content: Any, place: Place, value: Any) -> Any:
    content = copy.deepcopy(content)
    held = content
    for part in place[:-1]:
        held = held[part]
    if value is DELETED:
        del held[place[-1]]
    else:
        held[place[-1]] = value
    return content


def manifest_of(folder: Path) -> Any:
    return json.loads((folder / "manifest.json").read_text("utf-8"))


def opened(folder: Path, content: Any) -> Bundle:
    (folder / "manifest.json").write_text(json.dumps(content), "utf-8")
    return Bundle.open(folder)


def run_in_chunks(bundle: Bundle) -> None:
    assert bundle.manifest.chunked is not None
    model = ChunkedModel(bundle.path / CHUNKED, bundle.manifest.chunked, threads=1, chunk_tokens=8)
    model.run(np.arange(20), evidence=bundle.manifest.chunked.evidence)


@pytest.mark.parametrize("value", VALUES, ids=lambda v: "deleted" if v is DELETED else repr(v))
def test_changed_field_gives_no_traceback(value: Any, bundle_copy: Path) -> None:
    whole = manifest_of(bundle_copy)
    refused = []
    for place in places(whole):
        try:
            bundle = opened(bundle_copy, changed(whole, place, value))
            if place[0] == "chunked" and bundle.manifest.chunked is not None:
                run_in_chunks(bundle)
        except AftexportError as error:
            refused.append(str(error))
    assert refused
    assert not [said for said in refused if "pydantic" in said or "validation error" in said]


def test_whole_manifest_runs_in_chunks(bundle_copy: Path) -> None:
    run_in_chunks(opened(bundle_copy, manifest_of(bundle_copy)))


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("chunked", "stages"), [], "chunked.stages: expected 1 stage.*, got 0"),
        (("chunked", "stages"), {}, "chunked.stages: expected a list, got an object"),
        (("chunked", "stages", 0), {}, r"chunked.stages.0.left: .*missing"),
        (("chunked", "stages", 0, "left"), -1, r"stages.0.left: expected .* 0, got -1"),
        (("chunked", "stages", 0, "left"), "x", r"stages.0.left: expected an integer, got 'x'"),
        (("chunked", "pooled"), {}, "chunked: pooled: expected a value for .*, got none"),
        (("chunked", "documents"), [], "chunked: documents: expected an output .*, got none"),
        (("chunked", "tokens"), {"logits": 3}, "chunked: tokens: expected outputs beside .*logits"),
        (("chunked", "tokens"), {"tags": 3}, r"chunked.tokens: expected .*, \{\}, got .*tags"),
        (("chunked", "pooled"), None, r"chunked.pooled: expected .*, got null"),
        (("chunked", "token_bytes"), [], r"chunked.token_bytes: expected .*, got a list of 0"),
        (("heads", "logits", "labels"), [], r"logits.*labels: expected .*, got a list of 0"),
        (("inputs",), ["tokens"], r"inputs: expected one of .*, got \('tokens',\)"),
        (("tolerance",), 1e300, r"tolerance: expected .* 1, got 1e\+300"),
        (("versions",), DELETED, r"versions: .*missing"),
        (("color",), "red", r"color: .*unknown"),
    ],
)  # fmt: skip
def test_error_names_field_expected_and_got(
    place: Place, value: Any, said: str, bundle_copy: Path
) -> None:
    content = changed(manifest_of(bundle_copy), place, value)
    with pytest.raises(BundleError, match=said):
        opened(bundle_copy, content)


def test_extra_pooled_value_is_refused(bundle_copy: Path) -> None:
    content = manifest_of(bundle_copy)
    how = next(iter(content["chunked"]["pooled"].values()))
    content["chunked"]["pooled"]["x"] = how
    with pytest.raises(AftexportError, match="expected a pooled x as in the manifest"):
        run_in_chunks(opened(bundle_copy, content))
