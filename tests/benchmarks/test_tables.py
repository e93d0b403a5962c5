from typing import Any

import pytest

from benchmarks import aarch64, tables
from benchmarks.pictures import ratios, softmax_points
from benchmarks.table_parts import best_peer, grouped

FACTS = {
    "aftexport_fp32": ("aftexport fp32", "fp32", True),
    "aftexport_int8": ("aftexport int8", "int8", True),
    "slow": ("Slow", "fp32", False),
    "fast_int8": ("Fast int8", "int8", False),
    "refusing": ("Refusing", "fp32", False),
}
FACTS_OF_PEER = {"precision": "fp32", "is_ours": False, "is_same_function": True}


def row(mechanism: str, contender: str, seconds: float) -> dict[str, Any]:
    return {"mechanism": mechanism, "contender": contender, "seconds": seconds, "tokens": 64,
            "error_float32": 1e-3}  # fmt: skip


RECORD: dict[str, Any] = {
    "date": "2026-01-02",
    "commit": "0123456789ab",
    "processor": {"title": "Some processor", "vendor": "Maker", "family": 1, "model": 2},
    "threads": 2,
    "contenders": {
        name: {"title": title, "precision": precision, "is_ours": ours, "is_same_function": True}
        for name, (title, precision, ours) in FACTS.items()
    },
    "cannot": [
        {"mechanism": "aft_simple", "tokens": 64, "contender": "refusing",
         "reason": "cannot read: no Scan"}
    ],
    "rows": [
        row("aft_simple", "aftexport_fp32", 0.1), row("aft_simple", "aftexport_int8", 0.05),
        row("aft_simple", "slow", 0.3), row("aft_simple", "fast_int8", 0.02),
    ],
}  # fmt: skip


def test_best_peer_has_same_or_finer_precision() -> None:
    group = grouped(RECORD["rows"])["aft_simple", 64].values()
    for precision, name in (("fp32", "slow"), ("bf16", "slow"), ("int8", "fast_int8")):
        best = best_peer(group, RECORD["contenders"], precision)
        assert best is not None
        assert best["contender"] == name


def test_best_peer_ignores_other_functions() -> None:
    facts = RECORD["contenders"] | {"slow": RECORD["contenders"]["slow"] | {"is_same_function": 0}}
    assert best_peer(RECORD["rows"][:3], facts) is None


def test_ratio_names_best_peer() -> None:
    lines = list(tables.ratio_lines(RECORD, {"aft_simple": 64}))
    assert lines[-1] == "| AFT-simple | 3.0 (Slow) | not measured | 0.4 (Fast int8) |"


def test_ratio_names_large_error_of_peer() -> None:
    rows = [each | {"error_float32": 0.34} for each in RECORD["rows"]]
    lines = list(tables.ratio_lines(RECORD | {"rows": rows}, {"aft_simple": 64}))
    assert lines[-1].endswith("| 0.4 (Fast int8, error 0.3) |")


def test_lengths_have_ratios_alone_and_beside_neighbour() -> None:
    """Alone ours is three times as fast, beside a neighbour twice."""
    busy = {"aftexport_fp32": 0.4, "slow": 0.8}
    rows = [each | {"beside_neighbour": {"seconds_p95": busy[each["contender"]]}}
            for each in RECORD["rows"] if each["contender"] in busy]  # fmt: skip
    record = RECORD | {"rows": rows + [each | {"tokens": 128} for each in RECORD["rows"]]}
    assert list(tables.length_lines(record, [64, 128], "fp32"))[2:] == [
        "| AFT-simple | 3.0 | 3.0 |",
        "| AFT-simple, beside a neighbour | 2.0 |  |",
    ]
    assert ratios(record, "fp32") == {"AFT-simple": [(64, 0.3 / 0.1), (128, 0.3 / 0.1)]}


def test_refusal_stays_in_tables() -> None:
    lines = list(tables.time_lines(RECORD, {"aft_simple": 64}))
    assert "| Refusing | cannot read |  |" in lines
    assert "| Slow | 300 | 1e-03 |" in lines


def test_speed_names_common_peer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    more = [row("aft_conv", "aftexport_fp32", 0.1), row("aft_conv", "slow", 0.5),
            row("aft_conv", "aftexport_int8", 0.05)]  # fmt: skip
    record = RECORD | {"rows": RECORD["rows"] + more}
    facts = RECORD["contenders"] | {"absent": FACTS_OF_PEER | {"title": "Absent"}}
    monkeypatch.setattr(tables, "read_records", lambda kind: {"a": record})
    monkeypatch.setattr(tables, "read_registry", lambda: facts)
    heading, lines = tables.speed_table().split("\n\n")
    assert lines.splitlines()[2:] == [
        "| fp32 | Slow | 3.0 | 5.0 |",
        "| bf16 |  | not measured | not measured |",
        "| int8 |  | 0.4 (Fast int8) | 10 (Slow) |",
    ]
    assert " ".join(heading.split()).endswith(
        "Measured on 2026-01-02 on Some processor (family 1, model 2), with 2 threads and the code "
        "of commit 0123456789ab. Not measured there: Refusing; Absent."
    )


def test_widest_record_is_chosen() -> None:
    """Contenders and mechanisms count that were measured, not those that were asked for."""
    later = RECORD | {"date": "2027-01-01"}
    asked = {str(number): FACTS_OF_PEER for number in range(50)}
    narrow = RECORD | {
        "date": "2028-01-01", "rows": RECORD["rows"][:3], "contenders": asked | RECORD["contenders"]
    }  # fmt: skip
    assert tables.widest({"a": RECORD, "b": later, "c": narrow}) is later


def test_instructions_are_counted_between_markers() -> None:
    trace = [
        "IN: aft_count_begin", "0x1: ret", "Trace 0: a [x] aft_count_begin",
        "IN: work", "0x2: add", "0x3: ret", "Trace 0: b [x] work", "Trace 0: b [x] work",
        "IN: aft_count_end", "0x4: ret", "Trace 0: c [x] aft_count_end",
    ]  # fmt: skip
    assert aarch64.count_by_function(trace) == {"work": 4}


def test_marked_table_is_replaced() -> None:
    page = "before\n<!-- table: peers -->\nold\n<!-- end of table -->\nafter\n"
    filled = tables.filled(page)
    assert tables.peers_table() in filled
    assert "old" not in filled
    assert filled.startswith("before\n<!-- table: peers -->\n")
    assert tables.filled(filled) == filled


def test_plot_has_best_softmax_by_length() -> None:
    rows = [row("softmax", "fast_int8", 1.0), row("softmax", "slow", 2.0)]
    rows.append(row("softmax", "fast_int8", 9.0) | {"tokens": 128})
    assert softmax_points({"rows": rows}) == [(64, 1000.0), (128, 9000.0)]
