"""A change of the toolchain: the series goes on, its size is reported, and the toolchain is named as the cause."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
from nights import Cli, Stored, by_backend, commit, keep, measured, members, wobble

from groupbench.tracker.facts.environment import software_identity
from groupbench.tracker.judge.pasts import Past
from groupbench.tracker.judge.transitions import size

pytestmark = pytest.mark.sqlite
DRIVER: dict[str, Any] = {"environment": {"driver": "999.1"}}
ONE_COMMIT = {"commit": "005" + "c" * 37}
NEW = {"environment": {"triton": "3.8.0"}}


class TestPast:
    """Which results count as the past of a toolchain. Letters are toolchains; the newest result is last."""

    @pytest.mark.parametrize(
        ("used", "machine", "kept"),
        [
            ("AAAA", "0000", "0123"),
            ("AABB", "0000", "0123"),
            ("ABCD", "0000", "0123"),
            ("AABA", "0000", "013"),  # B was a trial
            ("ABAB", "0000", "13"),  # in turns from the start: its own results
            ("CABAB", "00000", "024"),  # and those of a toolchain that both replaced
            ("AAAAABAB", "00000000", "0123457"),  # A was in use long before: a level that B is compared with
            ("AABBA", "00110", "01234"),  # toolchains on another card do not count
            ("ABABC", "00000", "024"),  # in turns: an upgrade of the one whose turn it is
            ("ABABAC", "000000", "135"),
            ("ABACADAE", "00000000", "1357"),  # a new build every night
            ("AAAAABAAAAABAAC", "0" * 15, "01234678910121314"),  # every sixth run: not its turn
            ("AABBAAAAAC", "0" * 10, "01456789"),  # given up long ago
        ],
    )
    def test_each_toolchain_has_a_past_of_its_own(self, used: str, machine: str, kept: str) -> None:
        n = len(used)
        past = Past(
            series=1, run=np.arange(n), environment=np.array([int(text) for text in machine]),
            toolchain=np.array([ord(text) for text in used]), state=np.arange(n), log=np.zeros(n), error=np.zeros(n),
        )  # fmt: skip
        assert "".join(map(str, past.of_its_toolchain().run.tolist())) == kept


def test_the_size_is_of_the_newest_against_the_last_ones_before() -> None:
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(400):
        old, new = rng.normal(0, 0.01, 10), rng.normal(0.05, 0.01, 1)
        effect, low, high = size(old, new, math.nan, 0.0003)
        assert size(old, new, 0.01, 0.0003)[0] == effect
        assert low is not None and high is not None and low < effect < high
        held += low < 0.05 < high
    assert 0.88 < held / 400 < 0.98
    assert size(np.zeros(1), np.ones(1), math.nan, 0.01) == (1.0, None, None)
    far = np.concatenate([np.full(90, 9.0), np.zeros(10)])
    assert size(far, np.ones(1), 0.1, 0.0)[0] == 1.0


def test_two_toolchains_in_turns_from_the_first_night_are_judged_apart(cli: Cli, stored: Stored, make: Any) -> None:
    """The newer one is 10 % faster, and both get 10 % slower: that is the older one's level on its first night."""
    records = []
    for night in range(24):
        newer, step = night % 2, 1.1 if night >= 22 else 1.0
        ms = wobble(night) * (0.9 if newer else 1.0) * step
        commit = f"{night // 2:03x}" + "c" * 37
        records.append(make(night, ms=ms, commit=commit, **(NEW if newer else {})))
    stored(records)
    for run in ("run-022", "run-023"):
        code, rows = by_backend(cli, "--run", run)
        assert (code, rows["triton"]["verdict"]) == (3, "unconfirmed"), run
        assert rows["triton"]["change"] == pytest.approx(0.1, abs=5e-3)


@pytest.mark.parametrize("build", ["0", "{}"], ids=["another toolchain", "another build every night"])
def test_an_alert_is_not_closed_by_another_job_in_turns(cli: Cli, stored: Stored, make: Any, build: str) -> None:
    def night(number: int) -> Any:
        newer = number % 2
        ms = wobble(number) * (0.9 if newer else 1.3 if number >= 22 else 1.0)
        return make(number, ms=ms, **({"environment": {"triton": f"3.9.{build.format(number)}"}} if newer else {}))

    stored([night(number) for number in range(31)])
    assert "1 opened" in cli("gate", "--update").output
    stored([night(31)])
    assert "incidents: nothing new" in cli("gate", "--update").output
    assert [alert["state"] for alert in members(cli)] == ["new"]


UPGRADES = {
    "the second of two jobs": (26, {"triton": "3.9.1"}, "nightly@nightly", "triton 3.9.0 → 3.9.1: "),
    "the driver below the first": (25, {"driver": "580.2"}, "nightly@nightly", "driver 570.1 → 580.2: "),
    "the first of two jobs of one plan": (25, {"triton": "3.7.2"}, "nightly", "triton 3.7.1 → 3.7.2: "),
    "the second of two jobs of one plan": (26, {"triton": "3.9.1"}, "nightly", "triton 3.9.0 → 3.9.1: "),
}


@pytest.mark.parametrize(("nights", "new", "plan", "transition"), UPGRADES.values(), ids=UPGRADES)
def test_a_toolchain_in_turns_that_is_upgraded_is_compared_with_itself(
    cli: Cli, stored: Stored, make: Any, nights: int, new: dict[str, str], plan: str, transition: str
) -> None:
    """Stable takes 1.0 and nightly 0.9 ms, also with a newer Triton, or a new driver below stable."""
    records = []
    for night in range(nights):
        environment = ({"triton": "3.9.0"} if night % 2 else {}) | (new if night == nights - 1 else {})
        facts = {"plan": plan if night % 2 else "nightly", "environment": environment}
        records.append(make(night, ms=wobble(night) * (0.9 if night % 2 else 1.0), **facts))
    stored(records)
    code, rows = by_backend(cli)
    assert (code, rows["triton"]["verdict"]) == (0, "ok")
    assert rows["triton"]["transition"].startswith((f"{transition}+0.", f"{transition}-0."))


def test_a_toolchain_that_is_given_up_closes_its_alerts(cli: Cli, stored: Stored, make: Any) -> None:
    stored([make(night, ms=wobble(night)) for night in range(8)])
    stored([make(night, ms=1.3, **NEW) for night in range(8, 13)])
    assert "1 opened" in cli("gate", "--update").output
    stored([make(13, ms=1.0)])
    assert "1 fixed" in cli("gate", "--update").output


class TestGate:
    def test_the_series_continues_and_every_effect_is_listed(self, cli: Cli, stored: Stored, make: Any) -> None:
        stored([make(night, ms=wobble(night), backend=backend) for night in range(6) for backend in "abc"])
        levels = zip("abc", (1, 1.005, 1.05), strict=True)
        stored([make(6, ms=ms, backend=backend, **NEW, **ONE_COMMIT) for backend, ms in levels])
        code, rows = by_backend(cli)
        verdicts = {name: row["verdict"] for name, row in rows.items()}
        assert (code, verdicts) == (3, {"a": "ok", "b": "undecided", "c": "unconfirmed"})
        assert rows["b"]["transition"].startswith("triton 3.7.1 → 3.8.0: +0.5% (+0.")
        assert (rows["c"]["cause"], rows["c"]["note"]) == ("toolchain", "triton 3.7.1 → 3.8.0: +5.0% (+4.6% .. +5.4%)")
        output = cli("gate").stdout
        line = "triton 3.7.1 → 3.8.0, code unchanged: 3 series moved by +0.0% to +5.0%, median +0.5%; 1 slower\n"
        assert line in output
        assert "run `groupbench confirm` to measure both toolchains; same commit as the previous run" in output
        stored([make(night, ms=1.0, backend=backend, **NEW) for backend in "ab" for night in (7, 8)])
        stored([make(night, ms=1.05, backend="c", **NEW) for night in (7, 8)])
        code, rows = by_backend(cli)
        assert (code, rows["c"]["verdict"], rows["c"]["cause"]) == (1, "regressed", "toolchain")
        assert rows["a"]["transition"] is None
        assert "code unchanged" not in cli("gate").stdout

    def test_a_driver_asks_to_be_accepted(self, cli: Cli, stored: Stored, make: Any) -> None:
        new = {"environment": {"driver": "580.2"}}
        stored([make(night, ms=wobble(night)) for night in range(6)])
        stored([make(6, ms=1.05, **new, **ONE_COMMIT)])
        result = cli("gate")
        assert (result.exit_code, "driver 570.1 → 580.2: +5.0%" in result.stdout) == (3, True)
        assert "`groupbench incidents accept-transition` accepts the new levels" in result.stdout
        assert "groupbench confirm" not in result.stdout
        done = cli("incidents", "accept-transition")
        assert done.stdout.startswith("incident 1 invalid by Ada: driver 570.1 → 580.2; grouped_gemm triton")
        assert cli("gate").exit_code == 0
        stored([make(7, ms=1.05, **new)])
        assert cli("gate").exit_code == 0
        stored([make(night, ms=1.1, **new) for night in (8, 9, 10)])
        code, rows = by_backend(cli)
        assert (code, rows["triton"]["cause"], rows["triton"]["n"] > 5) == (1, "code", True)
        assert "nothing to accept" in cli("incidents", "accept-transition").stderr

    def test_no_command_is_named_that_cannot_decide(self, cli: Cli, stored: Stored, make: Any) -> None:
        """An A/B could confirm the improvement, but not the driver's slowdown, which is why the run does not pass."""
        stored([make(night, ms=wobble(night), backend=backend) for night in range(6) for backend in "ab"])
        new = {"environment": {"triton": "3.8.0", "driver": "580.2"}, **ONE_COMMIT}
        driver_alone = {"environment": {"driver": "580.2"}, **ONE_COMMIT}
        stored([make(6, ms=0.95, backend="a", **new), make(6, ms=1.05, backend="b", **driver_alone)])
        code, rows = by_backend(cli)
        assert (code, rows["a"]["verdict"], rows["b"]["verdict"]) == (3, "ok", "unconfirmed")
        assert cli("gate").stdout.splitlines()[0].startswith("GATE incomplete: 1 series unconfirmed; same commit")

    def test_another_card_is_gone_on_with_once_it_is_accepted(self, cli: Cli, stored: Stored, make: Any) -> None:
        new = {"environment": {"gpu_uuid": "GPU-2"}}
        stored([make(night, ms=wobble(night), backend=backend) for night in range(6) for backend in "ab"])
        stored([make(6, ms=1.03, backend="a", **new), make(6, ms=1.0, backend="b", **new)])
        code, rows = by_backend(cli)
        assert (code, rows["a"]["verdict"], rows["b"]["verdict"]) == (4, "incomparable", "ok")
        assert rows["a"]["change"] == pytest.approx(0.03, abs=1e-3)
        result = cli("gate")
        assert "gpu_uuid GPU-1 → GPU-2, and the code changed: 2 series moved by +0.0% to +3.0%" in result.stdout
        assert "accept-transition" in result.stdout
        assert len(cli("incidents", "accept-transition").stdout.splitlines()) == 2
        assert cli("gate").exit_code == 0
        stored([make(7, ms=1.1, backend="a", **new), make(7, ms=1.0, backend="b", **new)])
        code, rows = by_backend(cli)
        assert (code, rows["a"]["verdict"], rows["a"]["n"], rows["b"]["verdict"]) == (3, "unconfirmed", 1, "ok")
        assert rows["a"]["change"] == pytest.approx(0.068, abs=2e-3)  # a gross change, after one result

    def test_two_results_on_two_cards_need_no_interval(self, cli: Cli, stored: Stored, make: Any) -> None:
        """Without one, the threshold for a change decides: 0.05 % is no change, 5 % is one."""
        new = {"environment": {"gpu_uuid": "GPU-2"}}
        stored([make(0, ms=1.0, backend=backend) for backend in "ab"])
        stored([make(1, ms=1.0005, backend="a", **new), make(1, ms=1.05, backend="b", **new)])
        code, rows = by_backend(cli)
        assert (code, rows["a"]["verdict"], rows["b"]["verdict"]) == (4, "ok", "incomparable")

    @pytest.mark.parametrize(("series", "listed"), [(8, 8), (9, 0)])
    def test_a_few_incomparable_series_are_listed(
        self, series: int, listed: int, cli: Cli, stored: Stored, make: Any
    ) -> None:
        new = {"environment": {"gpu_uuid": "GPU-2"}}
        backends = [f"b{number}" for number in range(series)]
        stored([make(0, ms=1.0, backend=backend) for backend in backends])
        stored([make(1, ms=1.05, backend=backend, **new) for backend in backends])
        lines = cli("gate").stdout.splitlines()
        assert any(line.startswith(f"{series} series incomparable: gpu_uuid GPU-1 → GPU-2") for line in lines)
        assert sum(line.startswith("incomparable ") for line in lines) == listed

    def test_a_card_without_acceptance_gets_a_history_of_its_own(self, cli: Cli, stored: Stored, make: Any) -> None:
        new = {"environment": {"gpu_uuid": "GPU-2"}}
        stored([make(night, ms=wobble(night)) for night in range(6)])
        stored([make(night, ms=1.03, **new) for night in range(6, 10)])
        codes = [cli("gate", "--run", f"run-{night:03d}").exit_code for night in range(6, 10)]
        assert codes == [4, 4, 4, 0]

    def test_a_canary_that_moved_with_torch_blames_no_machine(self, cli: Cli, stored: Stored, make: Any) -> None:
        names = [{"operator": "canary", "backend": "cublas"}, {}]
        stored([make(night, ms=wobble(night), **name) for night in range(6) for name in names])
        stored([make(night, ms=1.05, environment={"torch": "2.14.0"}, **name) for night in (6, 7, 8) for name in names])
        code, rows = by_backend(cli)
        assert (code, rows["triton"]["verdict"], rows["cublas"]["cause"]) == (1, "regressed", "toolchain")

    def test_accuracy_that_a_toolchain_cost_is_its(self, cli: Cli, stored: Stored, make: Any) -> None:
        stored([make(night) for night in range(6)])
        stored([make(6, rms=9e-3, **NEW, **ONE_COMMIT)])
        code, rows = by_backend(cli)
        assert (code, rows["triton"]["metric"], rows["triton"]["cause"]) == (1, "accuracy", "toolchain")


class TestAB:
    """A/B comparisons of the toolchains, and of the commits if both changed, decide the verdict of a transition.

    The change is that of the points, whatever the A/Bs found.
    """

    @pytest.mark.parametrize(
        ("same_commit", "toolchains", "commits", "verdict", "cause", "noted"),
        [
            (True, ("same", 0.0), None, "ok", "toolchain", "A/B of both toolchains: no difference"),
            (True, ("different", 0.06), None, "regressed", "toolchain", "(+6.1% to +6.3%) in 12 blocks; triton"),
            (True, ("unknown", 0.02), None, "unresolved", "toolchain", ""),
            (True, None, None, "unconfirmed", "toolchain", ""),
            (False, ("different", 0.05), ("same", 0.0), "regressed", "toolchain", "triton 3.7.1 → 3.8.0: +5.1%"),
            (False, ("same", 0.0), ("different", 0.05), "regressed", "code", "code: +5.1%"),
            (False, ("different", 0.02), ("different", 0.03), "regressed", "code and toolchain", "code: +3.0%"),
            (False, ("same", 0.0), ("same", 0.0), "ok", "code and toolchain", "toolchains and commits: no difference"),
            (False, None, ("same", 0.0), "unconfirmed", "toolchain", "A/B of the commits: no difference"),
            (False, ("same", 0.0), None, "unconfirmed", "code", "A/B of the toolchains"),
            (False, None, ("different", 0.05), "regressed", "code", "not separated from the toolchain"),
            (False, None, None, "unconfirmed", "code and toolchain", "and the code changed"),
        ],
    )
    def test_of_a_suspect(
        self, cli: Cli, stored: Stored, make: Any, db: Any, same_commit: bool, toolchains: Any, commits: Any,
        verdict: str, cause: str, noted: str,
    ) -> None:  # fmt: skip
        made = [make(night, ms=wobble(night)) for night in range(6)]
        stored([*made, make(6, ms=1.05, **NEW, **(ONE_COMMIT if same_commit else {}))])
        base, head = commit(5), commit(5 if same_commit else 6)
        sides = [software_identity(record.environment) for record in (made[0], make(6, **NEW))]
        for effect, ends, details in ((toolchains, (base, base), {"toolchains": sides}), (commits, (base, head), {})):
            if effect is not None:
                at = datetime(2026, 2, 1, tzinfo=UTC)
                keep(db, measured(*ends, *effect, half=0.001, at=at, pairs=12, details=details))
        row = by_backend(cli)[1]["triton"]
        assert (row["verdict"], row["cause"], row["change"]) == (verdict, cause, pytest.approx(0.05, abs=1e-3))
        assert noted in row["note"]


@pytest.mark.parametrize(
    ("new", "advice"),
    [(NEW, "run `groupbench confirm` to measure both toolchains"), (DRIVER, "unconfirmed. ")],
    ids=str,
)
def test_an_ab_that_found_the_commits_alike_is_not_asked_again(
    cli: Cli, stored: Stored, make: Any, db: Any, new: dict[str, Any], advice: str
) -> None:
    stored([make(night, ms=wobble(night)) for night in range(6)])
    stored([make(6, ms=1.05, **new)])
    assert "to measure both commits" in cli("gate").stdout
    keep(db, measured(commit(5), commit(6), "same", 0.0, half=0.001, at=datetime(2026, 2, 1, tzinfo=UTC), pairs=12))
    assert advice in cli("gate").stdout.splitlines()[0]


def test_forty_nights_of_forty_tritons(cli: Cli, stored: Stored, make: Any) -> None:
    """One kernel of six is 20 % slower from night 30 on; the statistics are the real ones."""
    rng = np.random.default_rng(21)
    records = []
    for number in range(6):
        factor = [1.2 if number == 2 and night >= 30 else 1.0 for night in range(40)]
        ms = 0.1 * 1.7**number * np.array(factor) * np.exp(rng.normal(0, 0.005, 40))
        records += [
            make(night, ms=float(ms[night]), backend=f"b{number}", environment={"triton": f"3.8.{night}"}, **ONE_COMMIT)
            for night in range(40)
        ]
    stored(records)
    for night in (8, 16, 24, 29):
        code, rows = by_backend(cli, "--run", f"run-{night:03d}")
        assert (code, {row["verdict"] for row in rows.values()}) == (0, {"ok"}), night
    code, rows = by_backend(cli, "--run", "run-030")
    assert (code, {name for name, row in rows.items() if row["verdict"] != "ok"}) == (3, {"b2"})
    row = rows["b2"]
    assert (row["verdict"], row["cause"]) == ("unconfirmed", "toolchain")
    assert row["note"].startswith("triton 3.8.29 → 3.8.30: +") and row["low"] < 0.2 < row["high"]
