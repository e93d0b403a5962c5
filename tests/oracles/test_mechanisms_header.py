"""The formulas in C++ give the numbers of those in NumPy."""

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from oracles import mechanisms
from oracles.mechanisms import MECHANISMS

from .documents import CHANNELS, HEADS, TOKENS, WINDOW, attributes_of, random_inputs

COMPILER = os.environ.get("CXX", "g++")
pytestmark = pytest.mark.skipif(shutil.which(COMPILER) is None, reason="no g++")

WIDTHS = {"aft_full": TOKENS + 2, "aft_local": WINDOW, "aft_conv": WINDOW + 1}
CHOICES = {
    "gate": ("sigmoid", "tanh", "none", "relu"),
    "normalization": ("softmax", "scaling"),
    "feature_map": ("elu", "relu", "identity"),
}
NORMALIZERS = ("add", "clamp", "none")
GROUPS, VALUE_WIDTH, KEYS = 1, 3, 5
"""Heads of key and value, the channels of a value, and the number of keys in ``SHARED``."""
CASES = [
    *((stem, {"gate": gate}) for stem in MECHANISMS if "aft_" in stem for gate in CHOICES["gate"]),
    *(
        ("efficient_attention", {"normalization": n, "scale": 0.37})
        for n in CHOICES["normalization"]
    ),
    *(
        ("linear_attention", {"feature_map": name, "eps": 0.5, "normalizer": normalizer})
        for name in CHOICES["feature_map"]
        for normalizer in NORMALIZERS
    ),
    ("aft_simple", {"eps": 0.5}),
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

    choice = next((CHOICES[n].index(str(x)) for n, x in settings.items() if n in CHOICES), 0)
    number = next((x for x in settings.values() if isinstance(x, float)), 0.0)
    normalizer = NORMALIZERS.index(str(settings.get("normalizer", "add")))
    shape = [int(causal), TOKENS, length, CHANNELS, HEADS, WIDTHS.get(stem, 0)]
    computed = run(program, stem, [*shape, choice, number, normalizer, 0, 0, 0], inputs)
    np.testing.assert_allclose(computed.reshape(expected.shape), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("stem", ["efficient_attention", "linear_attention"])
def test_languages_agree_on_shared_keys(program: Path, stem: str, causal: bool) -> None:
    inputs = random_inputs(stem, [4], causal=causal)
    keys = TOKENS if causal else KEYS
    random = np.random.default_rng(1)
    inputs["key"] = random.normal(size=(1, keys, GROUPS * CHANNELS // HEADS))
    inputs["value"] = random.normal(size=(1, keys, GROUPS * VALUE_WIDTH))
    if not causal:
        inputs["key_lengths"] = np.array([keys])
    attributes = {**attributes_of(stem), "kv_num_heads": GROUPS}
    expected = MECHANISMS[stem](inputs, causal=causal, **attributes)
    number = {"efficient_attention": 1.0, "linear_attention": 1e-6}[stem]
    shape = [int(causal), TOKENS, 4, CHANNELS, HEADS, 0, 0, number, 0, GROUPS, VALUE_WIDTH]
    computed = run(program, stem, [*shape, 0 if causal else keys], inputs)
    np.testing.assert_allclose(computed.reshape(expected.shape), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_languages_agree_on_keys_of_heads(program: Path, causal: bool) -> None:
    inputs = random_inputs("aft_simple", [4], causal=causal)
    inputs["key"] = np.ascontiguousarray(inputs["key"][..., :HEADS])
    expected = mechanisms.aft_simple(inputs, causal=causal, num_heads=HEADS, eps=0.5)
    shape = [int(causal), TOKENS, 4, CHANNELS, HEADS, 0, 0, 0.5, 0, HEADS, 0, 0]
    computed = run(program, "aft_simple", shape, inputs)
    np.testing.assert_allclose(computed.reshape(expected.shape), expected, rtol=1e-12, atol=1e-12)


def run(
    program: Path, stem: str, arguments: list[int | float], inputs: dict[str, np.ndarray]
) -> np.ndarray:
    """Run a formula of the header on the tensors of one document."""
    done = subprocess.run(
        [program, stem, *map(str, arguments)],
        input=b"".join(x.tobytes() for name, x in inputs.items() if "lengths" not in name),
        capture_output=True,
        check=True,
    )
    return np.frombuffer(done.stdout)
