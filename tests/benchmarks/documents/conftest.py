"""A small made-up package of the form of the real one, which tests do not download."""

import random
import zipfile
from pathlib import Path

import pytest

from benchmarks.documents.texts import Data, build_data

WORDS = [f"word{number}" for number in range(400)]


def entry(field: str, value: str, content: str, more: str = "") -> str:
    return f"---\n{field}: {value}\n{more}---\n\n{content}\n"


def write_wheel(path: Path) -> Path:
    """Write a small package of the same form, with a near copy of every text of a family."""
    dice = random.Random(0)
    with zipfile.ZipFile(path, "w") as wheel:
        for family, count in {"gpl": 40, "apache": 40, "mit": 40, "other": 25}.items():
            for number in range(count):
                words = [family, *dice.choices(WORDS, k=dice.randint(12, 60))]
                for copy, content in enumerate((" ".join(words), ",\n".join(words).upper())):
                    name = f"licensedcode/data/rules/{family}_{number}_{copy}.RULE"
                    wheel.writestr(name, entry("license_expression", f"{family}-2.0", content))
        unknown = entry("key", "unknown", "", "is_unknown: yes\n")
        wheel.writestr("licensedcode/data/licenses/unknown.LICENSE", unknown)
        text = " ".join(dice.choices(WORDS, k=20))
        for name, expression in (
            ("a", "unknown"),
            ("b", "(mit or gpl-1.0-plus) and zlib"),
            ("c", "gpl-2.0 with classpath-exception-2.0"),
            ("d", "some-exception"),
        ):
            rule = entry("license_expression", expression, f"{name} {text}")
            wheel.writestr(f"licensedcode/data/rules/{name}.RULE", rule)
        wheel.writestr("licensedcode/data/rules/e.RULE", entry("license_expression", "mit", "MIT"))
    return path


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wheel(tmp_path_factory.mktemp("package") / "package.whl")


@pytest.fixture(scope="session")
def data(wheel: Path) -> Data:
    return build_data(wheel, families=3)
