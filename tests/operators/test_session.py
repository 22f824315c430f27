"""One invocation: its records, its files and its exit code."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from groupbench.operators.errors import Incomplete, UsageError
from groupbench.operators.session import Session, _Rows, check_writable
from groupbench.tracker.facts.record import Environment, Latency, Record, encode, read
from groupbench.tracker.tools import device_lock

Make = Callable[..., Record]
CPU = Environment(device="cpu", cpu="a CPU", torch="2.13.0")

# statuses of a run's cells -> exit code
EXITS: dict[str, tuple[list[str], int]] = {
    "all measured": (["ok", "ok"], 0),
    "nothing": ([], 3),
    "one wrong": (["ok", "wrong"], 1),
    "wrong is worse than incomplete": (["wrong", "error"], 1),
    "an error": (["ok", "error"], 3),
    "out of memory": (["ok", "oom"], 3),
    "a timeout": (["ok", "timeout"], 3),
    "skipped": (["ok", "skipped"], 3),
    "something cannot run here": (["ok", "unavailable"], 0),
    "nothing can run here": (["unavailable"], 3),
}


def run(session: Session, records: list[Record], interrupt: bool = False) -> int:
    def produce(*_: Any) -> Iterator[Record]:
        yield from records
        if interrupt:
            raise KeyboardInterrupt

    session.quiet = True
    session.open("test host", CPU)
    return session.collect(produce, len(records))


def opened(**facts: Any) -> Session:
    session = Session(**{"commit": "abcdef0123456789", "quiet": True} | facts)
    session.open("test host", CPU)
    return session


@pytest.mark.parametrize(("statuses", "code"), EXITS.values(), ids=EXITS)
def test_exit_code(statuses: list[str], code: int, make: Make) -> None:
    assert run(Session(), [make(f"b{i}", status=status) for i, status in enumerate(statuses)]) == code


def test_an_interrupt_keeps_the_measured_records(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.jsonl"
    assert run(Session(records_path=path), [make(), make("triton", ms=None, status="skipped")], interrupt=True) == 130
    assert [r.status for _, r in read(path.read_bytes().splitlines(keepends=True))] == ["ok", "skipped"]
    assert "2 cells: 1 ok, 1 skipped" in capsys.readouterr().out
    assert run(Session(trigger="nightly"), [make(), make("triton", ms=None, status="skipped")], interrupt=True) == 130
    assert "2 cells" not in capsys.readouterr().out, "`night` reports it in a line"


@pytest.mark.parametrize(
    ("message", "builds", "hints"),
    [
        ("OSError: libk.so: cannot open shared object file: No such file, at bench.py:4 in one", False, 1),
        ("ModuleNotFoundError: No module named '_k', at bench.py:4 in one", False, 1),
        ("ImportError: /here/_k.so: undefined symbol: f, at bench.py:4 in one", False, 1),
        ("OSError: libk.so: cannot open shared object file: No such file, at bench.py:4 in one", True, 0),
        ("ValueError: not a size, at bench.py:4 in one", False, 0),
    ],
)
def test_a_library_that_does_not_load_may_need_a_build(
    message: str, builds: bool, hints: int, make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    run(Session(builds=builds), [make(), make("one", ms=None, status="error", message=message)])
    hint = "one cannot load a module or a library: if it needs a build, set `setup` in groupbench.toml to the command"
    assert capsys.readouterr().out.count(hint) == hints


def test_no_line_of_the_table_ends_in_blanks(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    run(Session(), [make(), make("triton", ms=None, status="error", message="why " * 60)])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 3 and not [line for line in lines if line != line.rstrip()]


def test_skipped_cells_are_printed_once(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    def printed(problems: int, shape: str = "G=1,M_g={},N=3,K=4") -> list[str]:
        skipped = [
            make(name, ms=None, status="skipped", message="interrupted", shape=shape.format(m))
            for m in range(problems)
            for name in ("torch_loop", "triton")
        ]
        run(Session(commit="abcdef0123"), [make("other", shape="G=1,M_g=9,N=3,K=4"), *skipped], interrupt=True)
        out = capsys.readouterr().out.splitlines()
        rows = [line.split()[1] for line in out if line.startswith("G=")]
        assert rows == ["other"]
        return [line for line in out if "interrupted" in line]

    assert printed(1) == ["skipped: grouped_gemm fwd fp16 G=1,M_g=0,N=3,K=4 (2 cells): interrupted"]
    assert printed(38) == ["skipped: grouped_gemm fwd (76 cells of 38 problems): interrupted"]
    long = "G=200,M_g=" + "|".join("1" * 200) + ",N=3,K=4"
    assert printed(1, long) == ["skipped: grouped_gemm fwd (2 cells of 1 problem): interrupted"]


def test_a_run_that_another_command_began_is_named(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.jsonl"
    monkeypatch.setattr(sys, "argv", ["tritonbench", "--op", "x", "--shapes", "a"])
    begun = opened(records_path=path)
    path.write_bytes(encode(msgspec.structs.replace(make(), run=begun.run, environment=CPU)))
    for more, end in (([], "measured\n"), (["b"], "measured; it began as: tritonbench --op x --shapes a\n")):
        monkeypatch.setattr(sys, "argv", ["tritonbench", "--op", "x", "--resume", "--shapes", "a", *more])
        capsys.readouterr()
        opened(records_path=path, resume=True)
        assert capsys.readouterr().out.endswith(end)


def test_first_line_says_where(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    run(Session(commit="abcdef0123456789", branch="side"), [make()])
    first = capsys.readouterr().out.splitlines()[0]
    assert first == "groupbench: test host · CPU (a CPU) · torch 2.13.0 · commit abcdef0123"


def test_a_device_that_another_command_uses_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(device_lock, "is_locked", lambda path: True)
    monkeypatch.setattr(device_lock, "_WARNED", set())
    Session(commit="abcdef0123").open("test host", CPU, fleet=True)  # which holds the locks itself
    assert capsys.readouterr().err == ""
    Session(commit="abcdef0123").open("test host", CPU)
    assert "tritonbench: cpu-" in (err := capsys.readouterr().err) and "both measurements will be noisy" in err


def test_the_run_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["tritonbench", "--op", "x"])
    session = opened(branch="side", trigger="nightly", plan="night")
    assert (session.run.commit.branch, session.run.trigger, session.run.plan) == ("side", "nightly", "night")
    assert session.run.command == "--op x"
    assert opened().run.id != session.run.id


def test_csv_has_standard_output_to_itself(make: Make, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run(Session(csv=True, metrics=("latency",), records_path=tmp_path / "r"), [make(ms=2.0)])
    out, err = capsys.readouterr()
    assert out == "x_val;torch_loop-latency\nG=1,M_g=2,N=3,K=4;2.0\naverage;2.0\n"
    assert "groupbench: test host" in err
    assert "1 cell: 1 ok" in err


def test_a_wide_spread_is_reported(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    wild = make(ms=2.0)
    wild = msgspec.structs.replace(wild, latency=Latency(timing="cpu", bursts_ms=((1.0,), (60.0,))))
    run(Session(), [wild, make(ms=2.0)])
    assert "unsteady: 1 cell (bursts vary by more than 50 %)" in capsys.readouterr().out
    run(Session(), [make(ms=2.0)])
    assert "too noisy" not in capsys.readouterr().out


def test_files(make: Make, tmp_path: Path) -> None:
    output, output_json = tmp_path / "deep" / "o.csv", tmp_path / "o.json"
    output_json.write_text("old")
    run(Session(output=output, output_json=output_json, metrics=("latency",)), [make(ms=2.0)])
    assert output.read_text() == "x_val;torch_loop-latency\nG=1,M_g=2,N=3,K=4;2.0\naverage;2.0\n"
    assert json.loads(output_json.read_text()) == {
        "tritonbench_grouped_gemm_fwd[x_G=1,M_g=2,N=3,K=4-torch_loop]_latency": 2.0
    }
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["deep", "o.csv", "o.json"]


def test_records_without_a_commit_are_reported(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)
    run(Session(), [make()])
    run(Session(records_path=Path("r.jsonl"), commit="0123abcd"), [make()])
    assert "no git commit here" not in capsys.readouterr().err
    run(Session(records_path=Path("s.jsonl")), [make()])
    assert capsys.readouterr().err.startswith("tritonbench: no git commit here: ")


def test_plots(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    run(Session(plot=True, metrics=("latency",)), [make(ms=2.0), make("triton", ms=None, status="oom")])
    out = capsys.readouterr().out
    assert "█ 2\n" in out and "oom: why" in out


def test_a_file_is_whole_or_as_it_was(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "o.csv"
    path.write_text("old")

    def fails(records: Any, metrics: Any, baseline: Any, file: io.StringIO) -> None:
        file.write("half")
        raise OSError("disk full")

    monkeypatch.setattr("groupbench.operators.table.write_csv", fails)
    assert run(Session(output=path), [make()]) == 3
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("status", ["ok", "wrong"])
@pytest.mark.parametrize("field", ["output", "output_json"])
def test_an_unwritable_file_is_reported_and_the_rest_is_shown(
    field: str, status: str, make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    session = Session(**{field: Path("/dev/full")}, plot="")  # type: ignore[arg-type]
    assert run(session, [make(status=status)]) == (3 if status == "ok" else 1)
    out, err = capsys.readouterr()
    assert err == "tritonbench: /dev/full: cannot be written: No space left on device\n"
    assert f"1 cell: 1 {status}" in out


def test_records_that_cannot_be_written_end_the_measuring(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    closed: list[bool] = []

    def produce(*_: Any) -> Iterator[Record]:
        try:
            yield make()
            raise AssertionError("asked for more")
        finally:
            closed.append(True)

    session = opened(records_path=Path("/dev/full"))
    with pytest.raises(Incomplete, match=r"^cannot write /dev/full: No space left on device; nothing more is measured"):
        session.collect(produce, 2)
    assert closed
    assert "1 cell: 1 ok" in capsys.readouterr().out


@pytest.mark.parametrize("measured", [0, 1])
def test_records_of_a_host_that_gave_up_are_shown(
    measured: int, make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    def produce(*_: Any) -> Iterator[Record]:
        yield from [make()] * measured
        raise Incomplete("enough")

    with pytest.raises(Incomplete, match="enough"):
        opened().collect(produce, 1)
    assert ("1 cell: 1 ok" in capsys.readouterr().out) == bool(measured)


FULL = """
import resource, signal, sys
from groupbench.operators import session
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
with open(sys.argv[1], "ab", buffering=0) as file:
    for line in (b"a" * 79, b"b" * 79):
        session._append(file, line + b"\\n")
"""


def test_no_half_record_is_left_where_the_disk_is_full(tmp_path: Path) -> None:
    """A limit on the size of a file acts as a full disk, in a separate process: the second line is partly written."""
    path = tmp_path / "r.jsonl"
    done = subprocess.run([sys.executable, "-c", FULL, path], capture_output=True, text=True)
    assert "Incomplete: cannot write" in done.stderr
    assert "r.jsonl: File too large" in done.stderr
    assert path.read_bytes() == b"a" * 79 + b"\n"


def test_a_pipe_is_written_to(make: Make, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR)  # both ends, so that no one waits for the other
    try:
        run(Session(output=pipe, metrics=("latency",)), [make(ms=2.0)])
        assert pipe.is_fifo()
        assert os.read(reader, 4096).startswith(b"x_val;")
    finally:
        os.close(reader)


def test_records_are_appended_as_they_come(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    run(Session(records_path=path), [make()])
    seen: list[int] = []

    def produce(*_: Any) -> Iterator[Record]:
        for name in ("a", "b"):
            seen.append(path.read_bytes().count(b"\n"))
            yield make(name)

    opened(records_path=path).collect(produce, 2)
    assert seen == [1, 2]
    assert [r.cell.backend for _, r in read(path.read_bytes().splitlines(keepends=True))] == ["torch_loop", "a", "b"]


@pytest.mark.parametrize("field", ["records_path", "output", "output_json"])
def test_an_unwritable_path_is_reported_before_anything_is_measured(field: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "below", Path("/proc/none/below")):
        with pytest.raises(UsageError, match="cannot write"):
            Session(**{field: path}).open("test host", CPU)  # type: ignore[arg-type]


def test_trying_a_path_leaves_no_file(tmp_path: Path) -> None:
    check_writable(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    (tmp_path / "old").write_text("kept")
    check_writable(tmp_path / "old")
    assert (tmp_path / "old").read_text() == "kept"


def test_rows_of_finished_cells_count_each_once_and_tell_the_time_left(make: Make) -> None:
    now = iter([0.0, 10.0, 20.0])
    rows = _Rows(4, clock=lambda: next(now))
    rows.advance(2)  # the first two belong to one problem: their bursts took turns
    first, second = rows.of(make("a", ms=2.0)), rows.of(make("b", ms=None, status="oom"))
    assert first is not None and first.startswith("[1/4] ") and first.endswith(": 2.000 ms, ok, about 10 s left")
    assert second is not None and second.startswith("[2/4] ") and second.endswith(": oom, about 20 s left")
    assert rows.of(make("c", ms=None, status="skipped")) is None
    rows.advance(2)
    last = rows.of(make("d", ms=2.0))
    assert last is not None and last.startswith("[3/4] ") and last.endswith(", ok")


def test_the_state_after_an_interrupt(make: Make, tmp_path: Path) -> None:
    session = Session(records_path=tmp_path / "r.jsonl")
    assert session.kept == "nothing was measured yet"
    session.records = [make(ms=2.0)]
    assert session.kept == f"1 cell kept in {tmp_path / 'r.jsonl'}; --resume continues the run"
    session.records_path = None
    assert session.kept == "1 cell measured; --records FILE would keep them"
