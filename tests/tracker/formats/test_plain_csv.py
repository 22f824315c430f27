"""Plain CSV with a mapping."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from groupbench.tracker.facts.errors import IngestError
from groupbench.tracker.facts.record import LONGEST_TEXT, Accuracy, Record
from groupbench.tracker.formats import Options, load

DATE = datetime(2026, 1, 31, tzinfo=UTC)


def read(write: Any, text: str, mapping: dict[str, str] | None = None, **facts: Any) -> tuple[Record, ...]:
    values = {"commit": "a", "date": DATE, "mapping": mapping or {}} | facts
    return load(write([text.encode()], "x.csv"), "csv", Options(**values)).records


def test_a_mapping(write: Any) -> None:
    text = "op,kernel,rows,cols,time\ngemm,fast,64,128,100\ngemm,fast,64,128,102\ngemm,slow,64,128,300\n"
    mapping = {"operator": "op", "backend": "kernel", "M": "rows", "N": "cols", "latency_ms": "time"}
    fast, slow = read(write, text, mapping, unit="us", gpu="H100", dtype="bf16")
    assert fast.latency is not None
    assert fast.latency.bursts_ms == ((pytest.approx(0.1),), (pytest.approx(0.102),)), "rows of one cell are bursts"
    assert fast.latency.timing == "gpu"
    assert fast.cell.shape == "M=64,N=128"
    assert fast.cell.dims == {"M": 64, "N": 128}
    assert (fast.cell.operator, slow.cell.backend, slow.cell.dtype) == ("gemm", "slow", "bf16")
    assert fast.environment.gpu == "H100"


def test_our_own_names_need_no_mapping(write: Any) -> None:
    text = "operator;backend;shape;latency_ms;commit;date;status;rms;flops\n" + "\n".join(
        ["g;a;M=8;1.5;c1;2026-01-01;ok;0.001;64", "g;a;M=8;1.6;c2;2026-01-02 12:00;wrong;;"]
    )
    path = write([text.encode()], "x.csv")
    first, second = load(path).records
    assert (first.run.commit.hash, second.run.commit.hash) == ("c1", "c2")
    assert second.run.started == datetime(2026, 1, 2, 12, tzinfo=UTC)
    assert (first.status, second.status) == ("ok", "wrong")
    assert first.accuracy is not None
    assert (first.accuracy.rms, first.cell.flops, second.accuracy) == (0.001, 64, None)
    assert first.cell.dims == {"M": 8}


@pytest.mark.parametrize(
    ("cell", "status"),
    [("1.5", "ok"), ("CUDA OOM", "oom"), ("", "skipped"), ("nan", "error"), ("0", "error"), ("-", "error")],
)
def test_text_is_a_status(write: Any, cell: str, status: str) -> None:
    (record,) = read(write, f"latency_ms,operator,backend\n{cell},g,a\n")
    assert (record.status, record.latency is not None) == (status, status == "ok")


@pytest.mark.parametrize("character", ["\x0b", "\x0c", "\x1e", "\x85", "\u2028"])
def test_lines_end_where_csv_says(write: Any, character: str) -> None:
    (record,) = read(write, f"latency_ms,operator,backend\n1.5,g,a{character}b\n")
    assert record.cell.backend == f"a{character}b"


def test_a_long_message_is_cut_and_says_so(write: Any) -> None:
    (record,) = read(write, f"latency_ms,operator,backend\nno luck {'x' * 2 * LONGEST_TEXT},g,a\n")
    assert record.message is not None and len(record.message) <= LONGEST_TEXT
    assert record.message.startswith("no luck x") and record.message.endswith(" more characters)")


def test_the_first_row_that_failed_and_the_largest_error_count(write: Any) -> None:
    rows = "1,g,a,ok,,0.1,\n2,g,a,wrong,off,0.3,nan\n3,g,a,,,0.2,4\n"
    text = f"latency_ms,operator,backend,status,message,rms,max_abs\n{rows}"
    (record,) = read(write, text)
    assert (record.status, record.message) == ("wrong", "off")
    assert record.accuracy == Accuracy(rms=0.3, max_abs=None)
    assert record.latency is not None and record.latency.bursts_ms == ((1.0,), (2.0,), (3.0,))
    (record,) = read(write, "latency_ms,operator,backend\n1.5,g,a\nCUDA OOM,g,a\n")
    assert (record.status, record.latency) == ("oom", None)
    (record,) = read(write, "latency_ms,operator,backend,status\n,g,a,oom\n")
    assert record.message == "the file has the status 'oom' without a reason"


def test_rows_of_one_cell_that_contradict_are_refused(write: Any) -> None:
    with pytest.raises(IngestError, match="line 3: flops is '65', but '64' in line 2 of the same cell"):
        read(write, "latency_ms,operator,backend,flops\n1,g,a,64\n2,g,a,65\n")


def test_an_unused_column_that_differs_within_a_cell_is_named(write: Any, cli: Any) -> None:
    """It may be a size, and the rows other problems."""
    text = "latency_ms,operator,backend,M,note\n1,g,a,8,x\n2,g,a,16,x\n"
    path = write([text.encode()], "x.csv")
    options = ["--commit", "aaaaaaa", "--date", "2026-01-31", path]
    note = "rows that differ in M became bursts of one cell; if they are other problems, give --map M=M"
    assert cli("import", *options).stdout.endswith(f"; {note}\n")
    assert note in cli("import", "--dry-run", *options).stderr
    assert "bursts of one cell" not in cli("import", "--map", "M=M", *options).stdout
    assert len(read(write, text, {"M": "M"})) == 2


@pytest.mark.parametrize(
    ("text", "mapping"),
    [
        ("latency_ms,latency_ms,operator,backend\n1,2,g,a\n", {}),
        ("t,t,operator,backend\n1,2,g,a\n", {"latency_ms": "t"}),
    ],
)
def test_two_columns_of_one_name_are_refused(write: Any, text: str, mapping: dict[str, str]) -> None:
    with pytest.raises(IngestError, match="2 columns are named"):
        read(write, text, mapping)


def test_a_byte_order_mark_is_skipped(write: Any) -> None:
    text = b"\xef\xbb\xbflatency_ms,operator,backend\n1,g,a\n"
    (record,) = load(write([text], "x.csv"), None, Options(commit="a", date=DATE)).records
    assert record.cell.operator == "g"


@pytest.mark.parametrize(
    ("text", "mapping", "message"),
    [
        ("a,b\n1,2\n", {"latency_ms": "c"}, "no column 'c'; columns: a, b"),
        ("a,b\n1,2\n", {"operator": "a"}, "no column for the latency; give --map latency_ms=COLUMN, one of a, b"),
        ("a,b\n1,2\n", {"latency_ms": "a"}, "line 2: no operator; give --map operator=COLUMN or --operator NAME"),
        ("latency_ms,operator,backend\n1,g\n", {}, "line 2: 2 cells for 3 columns"),
        ("latency_ms,operator,backend,m\n1,g,b,x\n", {"M": "m"}, "line 2: M 'x' is not a whole number"),
        ("latency_ms,operator,backend,date\n1,g,b,x\n", {}, "line 2: date: 'x' is not a date"),
        ("latency_ms,operator,backend,status\n1,g,b,x\n", {}, "line 2: status 'x' is not one of ok, wrong"),
        ("latency_ms,operator,backend,rms\n1,g,b,x\n", {}, "line 2: rms 'x' is not a number"),
        ("latency_ms,operator,backend\n", {}, "contains no results"),
        ("", {}, "is empty"),
    ],
)
def test_what_is_wrong_is_named(write: Any, text: str, mapping: dict[str, str], message: str) -> None:
    values: dict[str, Any] = {} if "date" in text else {"date": DATE}
    with pytest.raises(IngestError) as raised:
        read(write, text, mapping, **({"date": None} | values))
    assert message in raised.value.message


def test_units(write: Any) -> None:
    for unit, ms in (("s", 2000.0), ("ms", 2.0), ("us", 0.002), ("ns", 2e-6)):
        (record,) = read(write, "latency_ms,operator,backend\n2,g,a\n", unit=unit)
        assert record.latency is not None
        assert record.latency.bursts_ms == ((pytest.approx(ms),),)
    with pytest.raises(IngestError, match="--unit weeks is not one of s, ms"):
        read(write, "latency_ms,operator,backend\n2,g,a\n", unit="weeks")


def test_a_file_of_many_nights_is_many_runs(write: Any) -> None:
    text = "latency_ms,operator,backend,commit,date\n" + "".join(f"1,g,a,c{n},2026-01-0{n}\n" for n in range(1, 6))
    records = read(write, text, commit=None, date=None)
    assert len({r.run.id for r in records}) == 5
