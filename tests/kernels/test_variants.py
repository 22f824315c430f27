"""Test that the first variant that runs is taken, and that the failures of others are remembered."""

from __future__ import annotations

import pytest
import torch

from groupbench.kernels import variants
from groupbench.kernels.variants import Choice, Variant, choices, first_that_runs


@pytest.fixture(autouse=True)
def falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enable the fallback, which conftest.py disables for the other tests of this folder."""
    monkeypatch.delenv(variants.SETTING, raising=False)
    monkeypatch.setattr(variants, "_failed", {})


class Ways:
    """Makes variants that record their calls and raise the given exceptions."""

    def __init__(self) -> None:
        self.prepared: list[str] = []
        self.called: list[str] = []

    def __call__(
        self, name: str, at_prepare: Exception | None = None, at_call: Exception | None = None, **rest: object
    ) -> Variant[str]:
        def run() -> str:
            self.called.append(name)
            if at_call is not None:
                raise at_call
            return name

        def prepare() -> object:
            self.prepared.append(name)
            if at_prepare is not None:
                raise at_prepare
            return run

        return Variant(name, prepare, **rest)  # type: ignore[arg-type]


@pytest.fixture
def way() -> Ways:
    return Ways()


def test_the_first_is_taken_and_the_others_are_not_prepared(way: Ways) -> None:
    with choices() as made:
        run = first_that_runs("k", [way("best"), way("plain")])
        assert [run(), run()] == ["best", "best"]
    assert (way.prepared, way.called) == (["best"], ["best", "best"])
    assert made == [Choice("k", "best")]


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        ({"unsuitable": "its instructions are Hopper's"}, "its instructions are Hopper's"),
        ({"at_prepare": ImportError("no async_load")}, "ImportError: no async_load"),
        ({"at_prepare": AttributeError("'x' has no attribute '_y'")}, "AttributeError: 'x' has no attribute '_y'"),
        ({"at_call": RuntimeError("out of resource: shared memory")}, "RuntimeError: out of resource: shared memory"),
        (
            {"at_call": RuntimeError("CUDA error: too many resources requested for launch")},
            "RuntimeError: CUDA error: too many resources requested for launch",
        ),
        (
            {"at_call": RuntimeError("Triton Error [CUDA]: invalid argument")},
            "RuntimeError: Triton Error [CUDA]: invalid argument",
        ),
        ({"at_call": AssertionError()}, "AssertionError"),
    ],
    ids=["unsuitable", "import", "removed_name", "shared_memory", "launch", "driver", "without_words"],
)
@pytest.mark.filterwarnings("ignore:k. best does not run")
def test_the_next_is_taken_and_the_reason_kept(failure: dict[str, object], reason: str, way: Ways) -> None:
    with choices() as made:
        assert first_that_runs("k", [way("best", **failure), way("plain")])() == "plain"  # type: ignore[arg-type]
    assert made == [Choice("k", "plain", (("best", reason),))]


def test_a_failed_variant_is_not_tried_again_for_the_same_key(way: Ways) -> None:
    def run(key: int) -> str:
        return first_that_runs("k", [way("best", at_call=RuntimeError("no"), key=key), way("plain")])()

    with pytest.warns(RuntimeWarning, match="k: best does not run: RuntimeError: no"):
        assert run(1) == "plain"
    with choices() as made:
        assert run(1) == "plain"
    assert way.called.count("best") == 1
    assert made == [Choice("k", "plain", (("best", "RuntimeError: no"),))]
    with pytest.warns(RuntimeWarning):
        assert run(2) == "plain"
    assert way.called.count("best") == 2


@pytest.mark.filterwarnings("ignore:k. best does not run")
def test_if_nothing_runs_the_last_error_names_the_others(way: Ways) -> None:
    run = first_that_runs("k", [way("best", at_call=RuntimeError("first")), way("plain", at_call=ValueError("second"))])
    with pytest.raises(ValueError, match="second") as raised:
        run()
    assert raised.value.__notes__ == ["k: best does not run either: RuntimeError: first"]
    with pytest.raises(ValueError, match="third"):
        first_that_runs("k", [way("only", at_prepare=ValueError("third"))])


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access"),
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("CUDA error: unspecified launch failure"),
    ],
    ids=["memory", "tritons_memory", "context", "assert", "launch_failure"],
)
def test_an_error_that_is_not_the_variants_is_raised(error: Exception, way: Ways) -> None:
    with pytest.raises(type(error)):
        first_that_runs("k", [way("best", at_call=error), way("plain")])()
    assert way.called == ["best"]


def test_an_error_after_the_first_call_is_raised(way: Ways) -> None:
    errors = [None, RuntimeError("later")]

    def call() -> str:
        if error := errors.pop(0):
            raise error
        return "best"

    run = first_that_runs("k", [Variant("best", lambda: call), way("plain")])
    assert run() == "best"
    with pytest.raises(RuntimeError, match="later"):
        run()


def test_off_raises_what_a_variant_raises(way: Ways, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variants.SETTING, "off")
    with pytest.raises(ImportError):
        first_that_runs("k", [way("best", at_prepare=ImportError("no")), way("plain")])
    assert first_that_runs("k", [way("best", unsuitable="too large"), way("plain")])() == "plain"
