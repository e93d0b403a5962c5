"""The formulas in C++ give the numbers of those in NumPy."""

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from oracles.mechanisms import MECHANISMS

from .documents import CHANNELS, HEADS, TOKENS, WINDOW, attributes_of, random_inputs

COMPILER = os.environ.get("CXX", "g++")
pytestmark = pytest.mark.skipif(shutil.which(COMPILER) is None, reason="no g++")

WIDTHS = {"aft_full": TOKENS + 2, "aft_local": WINDOW, "aft_conv": WINDOW + 1}
ENUMERATIONS = (("sigmoid", "tanh", "none"), ("softmax", "scaling"), ("elu", "relu"))
NUMBERS = {name: i for names in ENUMERATIONS for i, name in enumerate(names)}
CASES = [
    *((stem, {"gate": gate}) for stem in MECHANISMS if "aft_" in stem for gate in ENUMERATIONS[0]),
    *(("efficient_attention", {"normalization": n, "scale": 0.37}) for n in ENUMERATIONS[1]),
    *(("linear_attention", {"feature_map": name, "eps": 0.5}) for name in ENUMERATIONS[2]),
    ("fastformer", {}),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("oracles") / "mechanisms_program"
    source = Path(__file__).with_name("mechanisms_program.cc")
    command = [COMPILER, "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", source, "-o", built]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return built


@pytest.mark.parametrize("length", [TOKENS, 4, 0])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("stem", "settings"), CASES)
def test_languages_agree(
    program: Path, stem: str, settings: dict[str, str | float], causal: bool, length: int
) -> None:
    inputs = random_inputs(stem, [length], causal=causal)
    if stem.startswith("aft_"):
        inputs["key"][0, 0] = -np.inf
    expected = MECHANISMS[stem](inputs, causal=causal, **attributes_of(stem), **settings)

    choice = next((NUMBERS[x] for x in settings.values() if isinstance(x, str)), 0)
    number = next((x for x in settings.values() if isinstance(x, float)), 0.0)
    shape = [int(causal), TOKENS, length, CHANNELS, HEADS, WIDTHS.get(stem, 0)]
    done = subprocess.run(
        [program, stem, *map(str, [*shape, choice, number])],
        input=b"".join(x.tobytes() for name, x in inputs.items() if name != "lengths"),
        capture_output=True,
        check=True,
    )
    computed = np.frombuffer(done.stdout).reshape(expected.shape)
    np.testing.assert_allclose(computed, expected, rtol=1e-12, atol=1e-12)
