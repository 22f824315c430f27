"""`groupbench import`: recognising, storing whole or not at all, storing once."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cases import Cli, refused
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from repositories import git

from groupbench.tracker.facts.errors import IngestError
from groupbench.tracker.facts.record import STATUSES, decode, encode
from groupbench.tracker.formats import FORMATS, Options, load
from groupbench.tracker.formats.values import dims_of, number_of, status_of

from . import test_asv, test_google_benchmark, test_pytest_benchmark
from .test_others import helion, nv_state, nv_summary, nvbench

DATA = Path(__file__).parents[1] / "data"
SAMPLE = DATA / "tritonbench_grouped_gemm.json"
SAID = ("--commit", "10b14473", "--date", "2026-01-31", "--gpu", "NVIDIA H100")


def history(cli: Cli) -> list[dict[str, Any]]:
    return json.loads(cli("history", "--format=json").stdout)


def test_the_help_lists_every_format(cli: Cli) -> None:
    text = "".join(cli("import", "--help").stdout.split())
    assert f"Format of the files: {', '.join(FORMATS)}. Default".replace(" ", "") in text
    listed = cli("import", "--formats").stdout
    assert [line for line in listed.split("\n") if line and not line.startswith(" ")] == list(FORMATS)


def test_importing_twice_changes_nothing(cli: Cli) -> None:
    first = cli("import", SAMPLE, *SAID, "--dtype", "bf16")
    assert first.exit_code == 0, first.stderr
    assert "TritonBench JSON: 4 results: 4 points added, 0 already known, 4 series new; run import-" in first.stdout
    before = history(cli)
    again = cli("import", SAMPLE, *SAID, "--dtype", "bf16")
    assert "0 points added, 4 already known (nothing new)" in again.stdout
    assert history(cli) == before
    assert {r["hardware"] for r in before} == {"NVIDIA H100"}
    assert [r["latency_ms"] for r in before if r["backend"] == "triton_grouped_gemm"] == pytest.approx(
        [0.2518079876899719, 0.3288320004940033], rel=1e-6
    )


def test_a_benchmark_that_groupbench_cannot_measure_gets_no_advice_to_measure_it(cli: Cli, write: Any) -> None:
    rows = [test_google_benchmark.one("BM_Sort", 10.0 + 0.01 * index) for index in range(3)]
    for commit, factor in (("a" * 40, 1), ("b" * 40, 4)):
        context = test_google_benchmark.CONTEXT | {"git_commit": commit, "date": f"2026-01-0{factor}T12:00:00"}
        slower = [row | {"run_name": "BM_Sort", "real_time": row["real_time"] * factor} for row in rows]
        path = write([json.dumps({"context": context, "benchmarks": slower}).encode()], f"{factor}.json")
        assert "1 point added" in cli("import", path).stdout
    judged = cli("gate")
    assert judged.exit_code == 3
    assert "groupbench cannot measure this benchmark: import further results of these commits" in judged.stdout
    assert "groupbench confirm" not in judged.stdout + judged.stderr
    assert "A/B" not in cli("confirm").stdout


def test_a_commit_is_one_word(cli: Cli, db: Path) -> None:
    done = cli("import", SAMPLE, "--commit", "not a sha!")
    assert (done.exit_code, db.exists()) == (2, False)
    assert "'not a sha!' is not a commit" in done.stderr


def test_a_night_after_a_night(cli: Cli, tmp_path: Path) -> None:
    slower = tmp_path / "slower.json"
    slower.write_text(SAMPLE.read_text().replace('"0.2518', '"0.3518'))
    cli("import", SAMPLE, *SAID)
    cli("import", slower, "--commit", "20b14473", "--date", "2026-02-01", "--gpu", "NVIDIA H100")
    changed = [r for r in history(cli) if r["change"]]
    assert [(r["backend"], r["shape"]) for r in changed] == [("triton_grouped_gemm", "x_val=1024")]
    assert changed[0]["change"] == pytest.approx(0.1 / 0.2518, rel=1e-3)
    speedups = json.loads(cli("history", "--baseline", "aten_grouped_mm", "--format=json").stdout)
    assert all(row["speedup"] for row in speedups)


def test_out_of_memory_is_counted(cli: Cli) -> None:
    result = cli("import", DATA / "tritonbench_grouped_gemm.csv", "--operator", "grouped_gemm", *SAID)
    assert "6 results, 1 of them without a correct result" in result.stdout
    (oom,) = [r for r in history(cli) if r["status"] != "ok"]
    assert (oom["status"], oom["latency_ms"], oom["message"]) == ("oom", None, "CUDA OOM")


def test_a_mapping(cli: Cli, write: Any) -> None:
    path = write([b"op,kernel,t\ngemm,a,100\n"], "x.csv")
    options = ("--map", "latency_ms=t, operator=op,backend=kernel", "--unit", "us", "--commit", "aaaaaaa")
    assert cli("import", path, *options, "--date", "2026-01-31").exit_code == 0
    assert [r["latency_ms"] for r in history(cli)] == pytest.approx([0.1])


@pytest.mark.parametrize("name", ["times.csv", "times"])
def test_a_csv_without_a_mapping_names_the_option_and_its_header(cli: Cli, write: Any, name: str) -> None:
    assert "with --map latency_ms=COLUMN,operator=COLUMN,... (its header is op,kernel,t)" in refused(
        cli, "import", write([b"op,kernel,t\ngemm,a,100\n"], name)
    )


def test_a_dry_run_stores_nothing(cli: Cli, db: Path) -> None:
    result = cli("import", SAMPLE, *SAID, "--dry-run")
    records = [decode(line) for line in result.stdout.strip().split("\n")]
    assert len(records) == 4
    assert not db.exists()


def test_records_are_imported_as_ingest_does(cli: Cli, write: Any, make: Any) -> None:
    path = write([make(0), make(1)])
    assert "groupbench records: 2 results: 2 points added" in cli("import", path).stdout
    assert "0 points added, 2 already known" in cli("ingest", path).stdout


def test_the_store_is_made_by_nothing_that_fails(cli: Cli, write: Any, db: Path) -> None:
    assert cli("import", SAMPLE).exit_code == 2
    assert not db.exists()


def test_the_second_file_says_that_the_first_is_stored(cli: Cli, write: Any) -> None:
    bad = write([b"?"], "bad.json")
    result = cli("import", SAMPLE, bad, *SAID)
    assert result.exit_code == 2
    assert "bad.json: has no known format" in result.stderr
    assert "the file before it is stored" in result.stderr
    assert len(history(cli)) == 4


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "names no commit; give --commit HASH, and contains no date; give --date"),
        (("--commit", "a" * 7), "contains no date; give --date"),
        ((*SAID, "--format", "nope"), "no format 'nope'; known: records, tritonbench-json"),
        ((*SAID, "--format", "asv"), "looks like TritonBench JSON, not like asv results; omit --format"),
        ((*SAID, "--format", "csv"), "looks like TritonBench JSON, not like plain CSV"),
        ((*SAID, "--commit-of", "x"), "--commit-of must be one of tritonbench, triton, pytorch, not x"),
        (("--map", "x"), "'x' is not FIELD=COLUMN"),
        (("--map", "a=b,a=c"), "a is mapped twice"),
        (("--date", "soon"), "is not a date"),
    ],
    ids=str,
)
def test_mistakes_are_one_line(cli: Cli, db: Path, args: tuple[str, ...], message: str) -> None:
    assert message in refused(cli, "import", SAMPLE, *args)
    assert not db.exists()


def test_a_file_of_no_known_format_is_no_better_with_a_name(cli: Cli, write: Any) -> None:
    path = write([b'{"benchmarks": [' + b"1, " * 10_000 + b"]}"], "none.json")
    message = refused(cli, "import", path, "--format", "asv")
    assert "does not look like asv results: line 1: is not JSON" in message
    assert len(refused(cli, "import", path, "--format", "csv")) < 1000  # its header is the whole file


def test_files_that_are_none(cli: Cli, tmp_path: Path, write: Any) -> None:
    for path, message in (
        (tmp_path / "none", "No such file"),
        (tmp_path, "no known format"),
        (write([b""], "empty"), "is empty"),
        (write([b"\xff\xfe\x00"], "bytes"), "no known format"),
        (write([b"[" * 100_000], "deep"), "no known format"),
    ):
        assert message in refused(cli, "import", path, *SAID)
    deep = write([b'{"a":' * 100_000], "deep.json")
    for name in FORMATS:
        assert cli("import", deep, *SAID, "--format", name).exit_code == 2
        assert cli("import", tmp_path, *SAID, "--format", name).exit_code == 2
    latin = write([b"latency_ms,operator,backend\n1,g\xe9,b\n"], "latin.csv")
    assert "line 2: is not UTF-8" in cli("import", latin, *SAID).stderr


# --- any bytes --------------------------------------------------------------------------------------------------------

EVERYTHING = Options(device="cpu", commit="a", date=datetime(2026, 1, 1, tzinfo=UTC), operator="o", backend="b")

fuzzing = settings(
    max_examples=settings().max_examples // 3,  # of each format
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def read_or_refused(path: Path, name: str) -> None:
    try:
        loaded = load(path, name, EVERYTHING)
    except IngestError as error:
        assert "\n" not in error.message
        assert str(path) in error.message
    else:
        assert loaded.records
        for record in loaded.records:
            assert decode(encode(record)) == record
            assert record.status in STATUSES


@fuzzing
@given(content=st.binary(max_size=200))
@pytest.mark.parametrize("name", FORMATS)
def test_any_bytes_are_records_or_refused(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    read_or_refused(path, name)


DOCUMENTS: dict[str, Any] = {
    "tritonbench-json": json.loads(SAMPLE.read_text()),
    "v3": [json.loads(line) for line in (DATA / "oss_ci_benchmark_v3.jsonl").read_text().split("\n")[:3]],
    "asv": test_asv.RESULTS,
    "google-benchmark": {"context": test_google_benchmark.CONTEXT, "benchmarks": [test_google_benchmark.one("a/1")]},
    "pytest-benchmark": test_pytest_benchmark.DOCUMENT,
    "hyperfine": {"results": [{"command": "a", "stddev": 1.0, "mean": 1.0, "times": [1.0], "exit_codes": [0]}]},
    "github-action-benchmark": {
        "entries": {"s": [{"commit": {"id": "a"}, "date": 1, "benches": [{"name": "a", "value": 1, "unit": "ns"}]}]}
    },
    "bencher": {"a": {"latency": {"value": 1.0}, "b_us": {"value": 2.0}}},
    "nvbench": nvbench(nv_state([nv_summary("nv/cold/time/gpu/mean", value=1e-3)])),
    "vllm": {"date": "20260131-101112", "model_id": "m", "median_ttft_ms": 1.0, "latencies": [1.0], "avg_latency": 1.0},
    "sglang": {"median_e2e_latency_ms": 1.0, "request_rate": 4.0, "failed": 0, "total_latency": 1.0},
    "helion": [helion("helion_latency_ms", [1.0], ["s"])],
}

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8) | st.just("CUDA OOM"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of the values in `value`."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, item in items for place in places(item, (*at, key)))][: 10**4]


def replaced(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    if not at:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[at[0]] = replaced(value[at[0]], at[1:], new)
    return copy


@fuzzing
@given(data=st.data())
@pytest.mark.parametrize("name", DOCUMENTS)
def test_any_value_in_any_place_of_a_json(tmp_path: Path, name: str, data: st.DataObject) -> None:
    document = DOCUMENTS[name]
    for _ in range(data.draw(st.integers(1, 3))):
        document = replaced(document, data.draw(st.sampled_from(places(document))), data.draw(ANYTHING))
    path = tmp_path / "file.json"
    path.write_text(json.dumps(document))
    read_or_refused(path, name)


CELLS = st.text(max_size=6) | st.sampled_from(["1.5", "CUDA OOM", "nan", ""])


@fuzzing
@given(cells=st.lists(st.lists(CELLS, max_size=5), max_size=5))
@pytest.mark.parametrize(
    ("name", "header"),
    [("tritonbench-csv", "x_val;a-latency;a-accuracy;b-latency"), ("csv", "latency_ms;operator;M;rms;status")],
)
def test_any_cells_of_a_csv(tmp_path: Path, name: str, header: str, cells: list[list[str]]) -> None:
    path = tmp_path / "op.csv"
    lines = [header, *(";".join(row) for row in cells)]
    path.write_bytes("\n".join(lines).encode(errors="surrogatepass"))
    read_or_refused(path, name)


@given(st.text(max_size=30))
def test_any_text_in_place_of_a_number(text: str) -> None:
    number = number_of(text)
    status, message = status_of(text)
    assert number is None or isinstance(number, float)
    assert status in STATUSES
    assert status != "ok"
    assert message


@given(st.text(max_size=40))
def test_any_shape_has_sizes_that_can_be_stored(text: str) -> None:
    assert all(name and 0 <= value < 2**63 for name, value in dims_of(text).items())


def test_the_commit_is_one_that_git_knows(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hash may be of another repository; any other name must be of this one, if there is one."""
    rest = SAID[2:]
    monkeypatch.chdir(tmp_path)
    done = cli("import", SAMPLE, "--commit", "zzz", *rest, "--dry-run")
    assert (done.exit_code, "git knows no commit 'zzz' here; it is stored as it is" in done.stderr) == (0, True)
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "One")
    assert "git knows no commit 'zzz'" in refused(cli, "import", SAMPLE, "--commit", "zzz", *rest)
    done = cli("import", SAMPLE, "--commit", "10b14473", *rest, "--dry-run")
    assert (done.exit_code, "git knows no commit '10b14473' here" in done.stderr) == (0, True)
    first = git(tmp_path, "rev-parse", "HEAD")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "Two")
    for revision in ("HEAD~1", "HEAD^", ":/One", "@{1}"):
        done = cli("import", SAMPLE, "--commit", revision, *rest, "--dry-run")
        assert f'"hash":"{first}"' in done.stdout and "git knows" not in done.stderr, (revision, done.stderr)
