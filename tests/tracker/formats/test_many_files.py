"""Folders, archives and patterns: a transaction for each file, an interrupt keeps stored files, again continues."""

from __future__ import annotations

import gc
import io
import json
import tarfile
import time
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cases import refused

from groupbench.tracker import formats
from groupbench.tracker.formats import loading
from groupbench.tracker.store import checked as store_checked
from groupbench.tracker.tools import progress
from tests.tracker.formats.test_asv import BENCHMARKS, RESULTS


def asv_file(number: int) -> str:
    results = {"bench.time_plain": [[0.5 + number], [], "v1"], "bench.time_old": [[17.0], [], "v0"]}
    return json.dumps(RESULTS | {"commit_hash": f"{number:040x}", "results": results})


@pytest.fixture
def results(tmp_path: Path) -> Path:
    root = tmp_path / "results"
    (root / "i7").mkdir(parents=True)
    (root / "benchmarks.json").write_text(json.dumps(BENCHMARKS))
    (root / "i7" / "machine.json").write_text('{"machine": "i7"}')
    for number in range(1, 6):
        (root / "i7" / f"{number:08x}-py.json").write_text(asv_file(number))
    return root


def points(cli: Any) -> int:
    return len(json.loads(cli("history", "--format=json").stdout))


def test_a_folder_and_one_machine_of_it(cli: Any, results: Path) -> None:
    one = cli("import", results / "i7")
    assert "asv results, 5 files: 5 results: 5 points added" in one.stdout
    assert "5 results left out: 5 of another version of the benchmark (bench.time_old)" in one.stdout
    again = cli("import", results)
    assert "5 files: 5 results: 0 points added, 5 already known (nothing new), 0 series new" in again.stdout
    assert "; 5 files stored before" in again.stdout
    assert points(cli) == 5


def test_a_stored_file_is_not_read_again(cli: Any, results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cli("import", results)
    read, names = loading.read, []
    monkeypatch.setattr(loading, "read", lambda path, *args: names.append(path.name) or read(path, *args))
    assert "5 files stored before" in cli("import", results).stdout
    assert names == []
    (results / "i7" / "00000002-py.json").write_text(asv_file(2).replace("2.5", "9.5"))
    assert "1 point added, 4 already known" in cli("import", results).stdout
    assert names == ["00000002-py.json"]
    names.clear()
    facts = BENCHMARKS | {"bench.time_old": BENCHMARKS["bench.time_old"] | {"version": "v0"}}
    (results / "benchmarks.json").write_text(json.dumps(facts))
    assert "5 points added" in cli("import", results).stdout
    assert len(names) == 5
    names.clear()
    cli("import", results, "--branch", "other")
    assert len(names) == 5, "with other options, the runs are others"


def test_files_share_their_cells_which_are_checked_once(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (loading.read(results / "i7" / f"{n:08x}-py.json", None, loading.Options()).records for n in (1, 2))
    assert first[0].cell is second[0].cell
    looked_at: list[Any] = []
    monkeypatch.setattr(store_checked, "unstorable_parts", lambda run, cell: looked_at.append(cell))
    formats.checked(first * 3)
    assert len(looked_at) == 1


def test_a_result_is_checked_also_if_its_cell_is_known(results: Path) -> None:
    (record,) = loading.read(results / "i7" / "00000001-py.json", None, loading.Options()).records
    formats.checked([record])
    assert record.latency is not None
    for change in (
        {"duration_s": -1.0},
        {"status": "error", "message": None},
        {"latency": msgspec.structs.replace(record.latency, bursts_ms=((1e31,),))},
    ):
        with pytest.raises(formats.FormatError, match=r"result 2 \(bench.time_plain .* -\)"):
            formats.checked([record, msgspec.structs.replace(record, **change)])


@pytest.mark.parametrize("kind", ["zip", "tar", "tar.gz"])
def test_an_archive(cli: Any, results: Path, tmp_path: Path, kind: str) -> None:
    archive = tmp_path / f"history.{kind}"
    if kind == "zip":
        with zipfile.ZipFile(archive, "w") as packed:
            for file in sorted(results.rglob("*.json")):
                packed.write(file, file.relative_to(tmp_path))
    else:
        with tarfile.open(archive, "w:gz" if kind.endswith("gz") else "w") as tar:
            tar.add(results, "results")
    result = cli("import", archive)
    assert "asv results, 5 files: 5 results: 5 points added" in result.stdout, result.stderr


def test_an_archive_cannot_write_outside(cli: Any, tmp_path: Path) -> None:
    for name in ("../evil.json", "/tmp/evil.json"):
        archive = tmp_path / "a.tar"
        with tarfile.open(archive, "w") as tar:
            entry = tarfile.TarInfo(name)
            entry.size = 2
            tar.addfile(entry, io.BytesIO(b"{}"))
        assert "is outside the archive" in refused(cli, "import", archive)
    with tarfile.open(archive, "w") as tar:
        link = tarfile.TarInfo("a.json")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    assert "contains no file" in cli("import", archive).stderr
    (tmp_path / "b.zip").write_bytes(b"PK no zip")
    assert "cannot be unpacked" in cli("import", tmp_path / "b.zip").stderr


def test_a_pattern(cli: Any, results: Path) -> None:
    result = cli("import", f"{results}/**/0000000[12]-py.json")
    assert "2 files: 2 results: 2 points added" in result.stdout
    assert "no file matches" in cli("import", f"{results}/*.csv").stderr


def test_a_broken_file_of_a_folder_is_named_and_the_others_are_stored(cli: Any, results: Path) -> None:
    (results / "i7" / "00000003-py.json").write_text(asv_file(3)[:-40])
    (results / "notes.txt").write_text("nothing to see")
    result = cli("import", results)
    assert result.exit_code == 2
    assert "1 file of no known format" in result.stdout
    assert "1 file of" in result.stderr
    assert "00000003-py.json: line 1: is not JSON" in result.stderr
    assert "the 4 other files are stored" in result.stderr
    assert points(cli) == 4


def test_an_interrupt_keeps_what_is_stored_and_again_continues(cli: Any, results: Path, monkeypatch: Any) -> None:
    ready = loading.prepare

    def stops(source: Any, *args: Any, **named: Any) -> Any:
        if "00000004" in source.name:
            raise KeyboardInterrupt
        return ready(source, *args, **named)

    monkeypatch.setattr(loading, "prepare", stops)
    result = cli("import", results)
    assert "interrupted; 3 files stored; the same command continues" in result.stderr
    assert points(cli) == 3
    monkeypatch.setattr(loading, "prepare", ready)
    assert "2 points added, 3 already known" in cli("import", results).stdout
    assert points(cli) == 5


def test_a_stored_file_leaves_nothing_in_memory(cli: Any, results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of 900 files kept half a megabyte of each, as cycles, which are not collected within a file."""
    ready, left = loading.prepare, []

    def prepare(*args: Any, **named: Any) -> Any:
        left.append(gc.collect())
        return ready(*args, **named)

    monkeypatch.setattr(loading, "prepare", prepare)
    assert "5 points added" in cli("import", results).stdout
    assert max(left[1:]) < 50, left


def test_processes_store_the_same(cli: Any, results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_SHARED_FROM_BYTES", 0)
    monkeypatch.setattr(loading, "processes", lambda: 2)
    assert "5 points added" in cli("import", results).stdout
    assert points(cli) == 5


def test_a_single_file_has_no_progress(capsys: Any) -> None:
    with progress.Progress(1, "files", interval=0.0) as shown:
        shown._ended.wait(0.05)
    assert capsys.readouterr().err == ""


def test_files_stored_before_say_nothing_about_the_time_left() -> None:
    shown = progress.Progress(1000, "files")
    shown.began -= 10.0
    shown.add(900, 90_000, known=True)
    assert shown.line() == "900 of 1,000 files"
    shown.add(1, 100)
    assert shown.line().endswith(", about 17 min left"), shown.line()


def test_progress_is_written_to_a_stream_that_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.Progress(10, "files", interval=0.01) as shown:
        shown.add(1, 500)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and "left" not in (text := capsys.readouterr().err):
            time.sleep(0.01)
    assert "1 of 10 files, 500 results" in text
    assert progress.INTERVAL_S <= 2
