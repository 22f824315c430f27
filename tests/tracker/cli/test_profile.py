"""`groupbench profile` measures, stores and prints the counters; `explain` compares them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import Cli

from groupbench.tracker.facts.record import Record, encode
from groupbench.tracker.night import measuring
from groupbench.tracker.tools.device_lock import HELD

Make = Callable[..., Record]
Write = Callable[..., Path]

COUNTERS = {"ncu_ms": 1.25, "dram_mib": 96.0, "dram_share": 0.5, "tensor_share": 0.7}


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Make) -> Callable[..., list[str]]:
    """Let a script play `tritonbench`: it notes its arguments, writes any record, and ends with a code."""
    monkeypatch.setenv(HELD, str(tmp_path / "device.lock"))
    monkeypatch.chdir(tmp_path)
    noted = tmp_path / "noted.json"

    def play(record: Record | None, code: int) -> None:
        script = tmp_path / "played.py"
        line = b"" if record is None else encode(record)
        script.write_text(
            "import json, sys\n"
            f"json.dump(sys.argv[1:], open({str(noted)!r}, 'w'))\n"
            f"if {line!r}: open(sys.argv[sys.argv.index('--records') + 1], 'wb').write({line!r})\n"
            "print('the table of tritonbench')\n"
            f"sys.exit({code})\n"
        )
        monkeypatch.setattr(measuring, "PROGRAM", (sys.executable, str(script)))

    def read() -> Any:
        return json.loads(noted.read_text())

    play.read = read  # type: ignore[attr-defined]
    return play  # type: ignore[return-value]


ARGUMENTS = ("profile", "--operator", "grouped_gemm", "--backend", "triton")


def test_the_counters_are_stored_and_printed(played: Any, cli: Cli, make: Make, tmp_path: Path) -> None:
    played(make(0, metrics=COUNTERS), 0)
    done = cli(*ARGUMENTS, "--shape", "G=4,N=1024,K=1024", "--dtype", "bf16", "--plugin", "mine.py", "--format=json")
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.stdout)
    assert {name: row[name] for name in COUNTERS} == COUNTERS and row["latency"] == pytest.approx(1.0, rel=0.01)
    arguments = played.read()
    text = " ".join(arguments)
    assert "--host builtin --op grouped_gemm --costs memory,kernels,ncu --trigger profile" in text
    assert "--only triton --precision bf16 --plugin mine.py --shapes G=4,N=1024,K=1024 --records" in text
    assert "dram_mib" in cli("history", "--metrics", "dram_mib", "--format=csv").stdout
    assert not Path(arguments[-1]).parent.exists()


def test_without_a_shape_it_is_the_first(played: Any, cli: Cli, make: Make) -> None:
    played(make(0, metrics={"ncu_ms": 1.5}), 0)
    done = cli(*ARGUMENTS)
    assert (done.exit_code, "1.5" in done.stdout) == (0, True)
    arguments = played.read()
    assert " --num-inputs 1 " in " ".join(arguments)


def test_a_cell_without_counters_is_stored_and_incomplete(played: Any, cli: Cli, make: Make) -> None:
    played(make(0), 3)
    done = cli(*ARGUMENTS)
    assert done.exit_code == 3 and "triton" in done.stdout and "ncu" not in done.stdout
    assert "triton" in cli("history").stdout


def test_nothing_is_stored_if_nothing_was_measured(played: Any, cli: Cli) -> None:
    played(None, 3)
    done = cli(*ARGUMENTS)
    assert (done.exit_code, done.stdout) == (3, "")


# ---- explain


@pytest.fixture
def profiled(cli: Cli, write: Write, make: Make) -> None:
    """Two commits, each with a night without counters after the profile; no kernel is known."""
    for number, dram in ((0, 96.0), (1, 144.0)):
        commit, latency = f"{number}" * 40, {"timing": "gpu", "bursts_ms": [[1.0 + number]]}
        profile = make(2 * number, latency=latency, commit=commit, metrics=COUNTERS | {"dram_mib": dram})
        cli("ingest", write([profile]))
        cli("ingest", write([make(2 * number + 1, ms=9.0, commit=commit)]))


def test_explain_shows_the_counters_of_both_sides(profiled: None, cli: Cli) -> None:
    done = cli("explain", "previous", "latest")
    assert done.exit_code == 0, done.output
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    (title,) = [line for line in lines if line.startswith("profile of grouped_gemm triton")]
    assert title
    assert any(line.startswith("latency 1 ms 2 ms +100.0") for line in lines), done.stdout
    assert any(line.startswith("dram_mib 96 MiB 144 MiB +50.0") for line in lines)
    (pair,) = json.loads(cli("explain", "previous", "latest", "--format=json").stdout)["profiles"]
    assert pair["metrics"]["dram_mib"] == [96.0, 144.0] and pair["metrics"]["latency"] == [1.0, 2.0]


def test_a_later_profile_with_fewer_counters_does_not_hide_the_counters(cli: Cli, write: Write, make: Make) -> None:
    cli("ingest", write([make(0, backend=name, commit="a" * 40, metrics=COUNTERS) for name in ("one", "other")]))
    cli("ingest", write([make(1, backend="one", commit="a" * 40, metrics={"ncu_ms": 1.5})]))
    done = cli("explain", "a" * 40, "--backend", "one", "--against", "other")
    assert done.exit_code == 0 and "dram_mib" in done.stdout, done.output


def test_counters_of_one_side_explain_nothing(cli: Cli, write: Write, make: Make) -> None:
    cli("ingest", write([make(0, metrics=COUNTERS), make(1)]))
    assert cli("explain", "previous", "latest").exit_code == 3
    assert json.loads(cli("explain", "previous", "latest", "--format=json").stdout)["profiles"] == []
