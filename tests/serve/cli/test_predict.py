"""``aftserve predict``: its answers are those of ``/infer``, from every form of input."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import commands
import httpx
import input_models
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import assert_refused, environment, without

from aftexport.bundle.bundle import Bundle
from aftexport.bundle.features import default_names
from aftexport.errors import UsageError
from aftexport.extra_inputs import sample_values
from aftexport.system.installation import install_command
from aftserve.batch.rows import Columns, find
from aftserve.cli import main
from aftserve.predictor import Predictor

Capture = pytest.CaptureFixture[str]
TEXTS = ["An invoice.", 'Pay, "now"; or never\tagain.\nYours', "\N{GRINNING FACE} smile"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def predict(capsys: Capture, *words: str | Path) -> commands.Outcome:
    capsys.readouterr()
    code = main(["predict", *map(str, words)])
    captured = capsys.readouterr()
    return commands.Outcome(code, captured.out, captured.err)


def rows_of(outcome: commands.Outcome) -> list[dict[str, Any]]:
    return [json.loads(line) for line in outcome.out.splitlines()]


def table(separator: str, names: str = "id,text") -> str:
    """Return the texts as CSV, each in quotes."""
    lines = [names.replace(",", separator)]
    quoted = [text.replace('"', '""') for text in TEXTS]
    return "\n".join([*lines, *(f'n{n}{separator}"{text}"' for n, text in enumerate(quoted)), ""])


def write_forms(folder: Path) -> dict[str, list[str]]:
    """Write the texts in each form; return the ids of each."""
    ids = [f"n{n}" for n in range(len(TEXTS))]
    (folder / "texts").mkdir()
    for id, text in zip(ids, TEXTS, strict=True):
        (folder / "texts" / id).write_text(text, "utf-8")
    (folder / "commas.csv").write_text("\ufeff" + table(","), "utf-8")
    (folder / "semicolons.csv").write_text(table(";"), "utf-8")
    (folder / "tabs.tsv").write_text(table("\t"), "utf-8")
    lines = [json.dumps({"id": id, "text": text}) for id, text in zip(ids, TEXTS, strict=True)]
    (folder / "lines.jsonl").write_text("\n".join([*lines, ""]))
    pq.write_table(pa.table({"id": ids, "text": TEXTS}), folder / "table.parquet")
    found = {name.name: ids for name in folder.iterdir() if name.is_file()}
    return found | {"texts": [f"texts/{id}" for id in ids]}


def test_every_form_has_answers_of_server(
    bundle_folder: Path, client: httpx.Client, folder: Path, capsys: Capture
) -> None:
    answers = [client.post("/infer", json={"text": text}).json() for text in TEXTS]
    forms = write_forms(folder)
    outcome = predict(capsys, bundle_folder, *forms)
    assert outcome.code == 0, outcome.err
    assert f"{len(forms) * len(TEXTS)} documents" in outcome.err
    rows = rows_of(outcome)
    assert [row.pop("id") for row in rows] == [id for ids in forms.values() for id in ids]
    for row, answer in zip(rows, answers * len(forms), strict=True):
        assert row.keys() == answer.keys() - {"timings"}
        assert row.pop("scores") == pytest.approx(answer["scores"], abs=1e-5)
        assert row.items() <= answer.items()


def test_arrays_and_ids_are_documents(bundle_folder: Path, folder: Path, capsys: Capture) -> None:
    np.save(folder / "ids.npy", np.array([65, 66]))
    lines = ['{"input_ids": [65, 66]}', '{"body": "AB"}', "", '{"input_ids": [65.5]}', "[", "3"]
    (folder / "in.ndjson").write_text("\n".join(lines))
    outcome = predict(capsys, bundle_folder, "ids.npy", "in.ndjson", "--text", "body")
    assert outcome.code == 3, outcome.err
    array, ids, text, *failed = rows_of(outcome)
    assert [row["id"] for row in (array, ids, text)] == ["ids.npy", 1, 2]
    assert array["scores"] == ids["scores"]
    assert text["tokens_total"] == 2
    for row, said in zip(failed, ("line 4: input_ids", "line 5: ", "an object"), strict=True):
        assert said in row["error"]


@pytest.mark.parametrize(
    ("words", "given", "id"),
    [((), TEXTS[0], "-"), (("--format", "jsonl"), json.dumps({"text": TEXTS[0]}), 0)],
)
def test_standard_input_is_read(
    words: tuple[str, ...], given: str, id: object, bundle_folder: Path, folder: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "aftserve", "predict", bundle_folder, "-", *words],
        input=given.encode(), capture_output=True, env=environment(), check=True,
    )  # fmt: skip
    (row,) = map(json.loads, done.stdout.splitlines())
    assert row["id"] == id
    assert row["tokens_total"] == len(TEXTS[0])


def test_table_of_features_is_document(feature_bundle: Path, folder: Path, capsys: Capture) -> None:
    """The columns are found by their names; a row without a number is an error of its file."""
    values = np.random.default_rng(0).normal(
        input_models.MEAN, input_models.SCALE, (20, input_models.FEATURES)
    )
    np.save(folder / "series.npy", values)
    lines = [";".join(map(repr, [0.0, *row[::-1].tolist()])) for row in values]
    header = ";".join(["time", *input_models.NAMES[::-1]])
    (folder / "series.csv").write_text("\n".join([header, *lines, ""]))
    (folder / "broken.tsv").write_text("\t".join(input_models.NAMES) + "\n1\t,5\n")
    outcome = predict(capsys, feature_bundle, "series.npy", "series.csv", "broken.tsv")
    assert outcome.code == 3, outcome.err
    array, table, broken = rows_of(outcome)
    assert table["id"] == "series.csv"
    assert table["scores"] == array["scores"]
    assert "broken.tsv, line 2: expected a number" in broken["error"]
    (folder / "series.csv").write_text("a,b\n1,2\n")
    assert_refused(predict(capsys, feature_bundle, "series.csv"), "aftexport inspect")


@pytest.mark.parametrize("header", ["a,b", "1,2"])
def test_unnamed_features_follow_columns(header: str, folder: Path) -> None:
    (folder / "series.csv").write_text(f"{header}\n3,4\n5,6\n")
    columns = Columns(features=default_names(2))
    if header == "1,2":  # the first row would be lost
        with pytest.raises(UsageError, match="feature_0"):
            find([folder / "series.csv"], columns, max_characters=100)
        return
    (row,) = find([folder / "series.csv"], columns, max_characters=100)
    assert np.array_equal(np.asarray(row.document), [[3, 4], [5, 6]])


def test_inputs_are_columns(extra_bundle: Path, folder: Path, capsys: Capture) -> None:
    extras = Bundle.open(extra_bundle).manifest.extra_inputs
    generator = np.random.default_rng(0)
    inputs = [sample_values(extras, generator, len(text)).to_json() for text in TEXTS[:1]]
    cells = {name: json.dumps(value) for name, value in inputs[0].items()}
    quoted = [TEXTS[0], *cells.values()]
    header = ";".join(["text", *cells])
    (folder / "in.csv").write_text(
        f"{header}\n{';'.join(quoted)}\n{TEXTS[0]};x" + ";" * len(quoted)
    )
    (folder / "in.jsonl").write_text(json.dumps({"text": TEXTS[0], "inputs": inputs[0]}))
    pq.write_table(
        pa.table({"text": TEXTS[:1]} | {n: [v] for n, v in inputs[0].items()}), "a.parquet"
    )
    outcome = predict(capsys, extra_bundle, "in.csv", "in.jsonl", "a.parquet")
    assert outcome.code == 3, outcome.err
    table, bad, line, parquet = rows_of(outcome)
    with Predictor(extra_bundle, threads=1) as predictor:
        scores = predictor(TEXTS[0], inputs={n: inputs[0][n] for n in input_models.INPUTS}).scores
    for row in (table, line, parquet):
        assert row["scores"] == pytest.approx(scores, abs=1e-5)
    assert "in.csv, line 3: expected" in bad["error"]


def test_bad_rows_fail_alone(bundle_folder: Path, folder: Path, capsys: Capture) -> None:
    content = b'text,id\na,1\n\xe9,2\na,b,c\nb,5\n"open'
    (folder / "in.csv").write_bytes(content)
    outcome = predict(capsys, bundle_folder, "in.csv")
    assert outcome.code == 3
    rows = rows_of(outcome)
    assert [row["id"] for row in rows] == ["1", "2", 2, "5", 4]
    said = [row.get("error") for row in rows]
    assert (said[0], said[3]) == (None, None)
    assert "line 3: the text is not UTF-8" in said[1]
    assert "line 4: expected 2 values, got 3" in said[2]
    assert "invalid CSV" in said[4]


def test_strict_run_keeps_previous_output(
    bundle_folder: Path, folder: Path, capsys: Capture
) -> None:
    (folder / "in.jsonl").write_text('{"text": "a", "id": "x"}\n{"text": "", "id": "y"}')
    words = (bundle_folder, "in.jsonl", "--output", "out.jsonl")
    assert predict(capsys, *words).code == 3
    before = (folder / "out.jsonl").read_text()
    assert [json.loads(line)["id"] for line in before.splitlines()] == ["x", "y"]
    (folder / "in.jsonl").write_text('{"text": ""}')
    assert_refused(predict(capsys, *words, "--strict"), "document 0: ", "no tokens")
    assert (folder / "out.jsonl").read_text() == before


def test_closed_reader_ends_run_quietly(bundle_folder: Path, folder: Path) -> None:
    (folder / "in.jsonl").write_text('{"text": "a"}\n' * 2000)
    command = [sys.executable, "-m", "aftserve", "predict", bundle_folder, "in.jsonl"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.wait(60) == 1
        assert process.stderr is not None
        assert process.stderr.read() == b""


def test_full_disk_ends_run(bundle_folder: Path, folder: Path) -> None:
    (folder / "a.txt").write_text("a")
    command = [sys.executable, "-m", "aftserve", "predict", bundle_folder, "a.txt"]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, env=environment(), check=False
        )
    assert done.returncode == 1
    assert b"Standard output cannot be written (No space left on device)" in done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["absent.txt"], "absent.txt does not exist"),
        (["empty"], "no documents"),
        (["a.txt", "--text", "body"], "--text names a column"),
        (["a.txt", "--format", "csv"], "--format is for standard input"),
        (["a.txt", "--output", "out.csv"], "--output must end in .jsonl"),
        (["other.csv"], "one column 'text', got 'number, body' (separated by semicolons)"),
        (["latin.csv"], "not UTF-8 at byte 4"),
        (["long.csv"], "at most 65,536 bytes"),
        (["no.parquet"], "no.parquet"),
    ],
)
def test_unusable_input_is_refused(
    words: list[str], message: str, bundle_folder: Path, folder: Path, capsys: Capture
) -> None:
    (folder / "empty").mkdir()
    (folder / "a.txt").write_text("a")
    (folder / "other.csv").write_text("number;body\n1;a")
    (folder / "latin.csv").write_bytes(b"text\xe9\n")
    (folder / "long.csv").write_text("text," + '"' + "a" * 200_000)
    (folder / "no.parquet").write_text("no")
    assert_refused(predict(capsys, bundle_folder, *words), message)


def test_only_parquet_needs_pyarrow(bundle_folder: Path, folder: Path) -> None:
    (folder / "a.txt").write_text("a")
    (folder / "a.parquet").write_text("")
    outcomes = [
        without(["pyarrow", "ray"], "aftserve", "predict", bundle_folder, name, cwd=folder)
        for name in ("a.txt", "a.parquet")
    ]
    assert outcomes[0].code == 0, outcomes[0].err
    assert_refused(outcomes[1], "needs pyarrow", install_command("parquet"))
