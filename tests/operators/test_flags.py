"""TritonBench's flags on the built-in host."""

from __future__ import annotations

from typing import Any

import pytest

from groupbench.operators import flags
from groupbench.operators.errors import UsageError


@pytest.mark.parametrize(
    ("rest", "options"),
    [
        (["--bwd"], {"mode": "bwd"}),
        (["--fwd-bwd", "--simple-output"], {"mode": "fwd_bwd", "quiet": True}),
        (["--test-only"], {"bursts": 1, "samples": 1, "test_only": True}),
        (["--repcnt", "7", "--sleep=0.5"], {"samples": 7, "idle": 0.5}),
        (["--force", "--bypass-fail", "--keep-going"], {}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_flag_is_the_option_it_stands_for(rest: list[str], options: dict[str, Any]) -> None:
    assert flags.translated(rest) == options


def test_a_duration_of_runs_is_reported_to_have_no_effect(capsys: pytest.CaptureFixture[str]) -> None:
    assert flags.translated(["--warmup", "25", "--rep=100"]) == {}
    assert capsys.readouterr().err.count("this host takes --bursts of --samples runs each") == 2


@pytest.mark.parametrize("rest", [["--no-such"], ["--rep"], ["--sleep", "long"], ["--bwd=1"], ["word"]], ids=" ".join)
def test_unsupported_flags_are_refused(rest: list[str]) -> None:
    with pytest.raises(UsageError):
        flags.translated(rest)


@pytest.mark.parametrize(("flag", "meant"), [("--budgt", "--budget"), ("--warm-up=3", "--warmup"), ("--xyz", None)])
def test_an_unknown_flag_suggests_the_most_similar_one(flag: str, meant: str | None) -> None:
    with pytest.raises(UsageError) as caught:
        flags.translated([flag], ["--budget"])
    assert (f"(did you mean {meant}?)" in str(caught.value)) == (meant is not None)


@pytest.mark.parametrize("rest", [["--latency-measure-mode", "profiler"], ["--latency-measure-mode=profiler"]])
def test_a_flag_that_only_tritonbench_has_names_the_alternative(rest: list[str]) -> None:
    with pytest.raises(UsageError, match="on the built-in host, --protocol chooses how") as caught:
        flags.translated(rest, ["--unmeasured"])
    assert "did you mean" not in str(caught.value)
    assert not set(flags.INSTEAD) & {*flags.SWITCHES, *flags.ALWAYS, *flags.VALUES, *flags.IN_MS}
