"""Fingerprints of what ran: their hashes, and the differences between two."""

from __future__ import annotations

from typing import Any

import pytest

from groupbench.tracker.facts.loaded import ListsOnce, difference_of, difference_of_all, loaded_of, problem_of
from groupbench.tracker.facts.record import Loaded

FILES = {f"pkg/{name}.py": name for name in "abcdef"}
PACKAGES = {"numpy": "2.2.6", "torch": "2.13.0"}


def test_the_hash_does_not_depend_on_the_order() -> None:
    assert loaded_of(dict(reversed(FILES.items())), PACKAGES) == loaded_of(FILES, PACKAGES)
    assert loaded_of(FILES, {}).code != loaded_of({**FILES, "pkg/a.py": "b"}, {}).code


@pytest.mark.parametrize(
    ("loaded", "problem"),
    [
        (loaded_of(FILES, PACKAGES), None),
        (loaded_of({}, {}), None),
        (loaded_of(None, PACKAGES), None),
        (Loaded(code="h", packages="h"), None),  # an earlier record has the lists
        (Loaded(code="h", files=FILES), "loaded.code is not the hash of loaded.files"),
        (Loaded(files=FILES), "loaded.files has no hash"),
        (Loaded(packages="h", versions=PACKAGES), "loaded.packages is not the hash of loaded.versions"),
    ],
)
def test_a_hash_that_contradicts_its_list(loaded: Loaded, problem: str | None) -> None:
    assert problem_of(loaded) == problem


def test_differences_name_files_and_packages() -> None:
    after = {**FILES, "pkg/a.py": "changed", "pkg/new.py": "n"}
    del after["pkg/f.py"]
    difference = difference_of(loaded_of(FILES, PACKAGES), loaded_of(after, {**PACKAGES, "numpy": "2.4.0", "jax": "1"}))
    assert difference.same_code is False
    files = "pkg/a.py, pkg/f.py (no longer loaded), pkg/new.py (newly loaded)"
    assert difference.code_text == f"3 of 7 loaded files differ: {files}"
    assert difference.texts == (difference.code_text, "numpy 2.2.6 → 2.4.0")


def test_many_files_are_counted() -> None:
    difference = difference_of(loaded_of(FILES, {}), loaded_of(dict.fromkeys(FILES, "x"), {}))
    assert difference.code_text is not None and difference.code_text.endswith("pkg/d.py and 2 more")


UNKNOWN_CASES: dict[str, tuple[Any, Any]] = {
    "both": (None, None),
    "one": (None, loaded_of(FILES, {})),
    "code of one": (loaded_of(None, {}), loaded_of(FILES, {})),
    "code of both": (loaded_of(None, {}), loaded_of(None, {})),
}


@pytest.mark.parametrize(("before", "after"), UNKNOWN_CASES.values(), ids=list(UNKNOWN_CASES))
def test_unknown_is_never_equal(before: Loaded | None, after: Loaded | None) -> None:
    difference = difference_of(before, after)
    assert (difference.same_code, difference.code_text, difference.texts) == (None, None, ())


def test_a_hash_without_its_list_still_differs() -> None:
    difference = difference_of(Loaded(code="one"), loaded_of(FILES, {}))
    assert (difference.same_code, difference.code_text) == (False, "the loaded files differ")


def test_several_results_together() -> None:
    same, other = loaded_of(FILES, PACKAGES), loaded_of({**FILES, "pkg/a.py": "x"}, PACKAGES)
    assert difference_of_all([(None, same)]).same_code is None
    assert difference_of_all([(same, same), (None, same)]).code_text == "the loaded files are the same"
    assert difference_of_all([(same, same), (same, other)]).code_text == "1 of 6 loaded files differ: pkg/a.py"


def test_a_file_has_each_list_once(make: Any) -> None:
    loaded, once = loaded_of(FILES, PACKAGES), ListsOnce()
    other = loaded_of({"other.py": "o"}, PACKAGES)
    first, second, third, bare = (once(make(n, loaded=each)) for n, each in enumerate((loaded, loaded, other, None)))
    assert first.loaded == loaded
    assert second.loaded == Loaded(code=loaded.code, packages=loaded.packages)
    assert third.loaded == Loaded(code=other.code, files=other.files, packages=other.packages)
    assert bare.loaded is None
