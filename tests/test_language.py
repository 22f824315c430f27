"""The text of the repository keeps to the words and sentences of `ci/language.py`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from scripts_of_ci import script

ROOT = Path(__file__).parents[1]

language = script("language")


def folders() -> dict[str, list[Path]]:
    """Return the files to check by folder: the first two levels, for files deeper down too."""
    by_folder: dict[str, list[Path]] = {}
    for path in language.files([ROOT]):
        folder = path.relative_to(ROOT).parent.parts[:2]
        by_folder.setdefault("/".join(folder) or ".", []).append(path)
    return by_folder


FOLDERS = folders()


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_keeps_to_the_limits(folder: str) -> None:
    report = language.check(FOLDERS[folder])
    assert report.excess() == 0, "\n".join(map(str, [*report.hits, language.summary(report)]))


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if FOLDERS[folder][0].suffix == ".md"])
def test_sentences_are_short(folder: str) -> None:
    report = language.check([path for path in FOLDERS[folder] if path.suffix == ".md"])
    assert report.median() <= language.MEDIAN_WORDS
    assert report.p90() <= language.P90_WORDS


@pytest.mark.parametrize("folder", ["kernels", "operators", "tracker"])
def test_docstrings_have_no_chains_of_genitives(folder: str) -> None:
    """Limits per 1,000 words, from the most frequent of asv, sqlite-utils, Helion, pytest and SQLAlchemy's orm."""
    texts = [text.body for path in language.files([ROOT / folder]) for text in language.texts(path)
             if text.kind == "docstring"]  # fmt: skip
    words = re.findall(r"[a-z']+", " ".join(texts).lower())
    often = {word: 1000 * words.count(word) / len(words) for word in language.CHAINS}
    assert {word: rate for word, rate in often.items() if rate > language.CHAINS[word]} == {}


def hits(tmp_path: Path, name: str, text: str) -> list[tuple[int, str]]:
    """Return line and rule of every hit in a file."""
    file = tmp_path / name
    file.write_text(text)
    return [(hit.line, hit.rule.name) for hit in language.check([file]).hits]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.py", "x = 1  # as was told\n", [(1, "told")]),
        ("a.py", '"""Of the rows."""\n', [(1, "fragment")]),
        ("a.py", '"""Return the rows.\n\nThey lie\nbeside it."""\n', [(4, "beside")]),
        ("a.py", 'def told(mine: int) -> None:\n    said = f"{mine} were said to be # so"\n', "told mine said"),
        ("a.py", 'x = "é"  # anew\n', [(1, "anew")]),
        ("a.py", 'echo("a side is " "none of these")\n', [(1, "is none")]),
        ("a.py", "# Here it is\n# none.\n", [(1, "is none")]),
        ("a.py", "x = y is None  # `told`, and False where x is None\n", []),
        ("a.md", "Code:\n\n```\ntold\n```\n\nWhoever reads\n", [(7, "whoever")]),
        ("a.html", "<p title='told'>{{ told }} <b>said</b></p>\n", [(1, "told"), (1, "said")]),
        ("a.yml", "on: push  # told\nrun: x\n# The night\n# is told\n", [(1, "told"), (4, "told")]),
        ("a.sh", 'echo "there is none left"\n', [(1, "is none")]),
        ("a.js", "// meanwhile\nlet said = 1; /* said */\n", [(1, "meanwhile"), (2, "said")]),
        ("Dockerfile", "# anew\nFROM x\n", [(1, "anew")]),
    ],
)
def test_words_are_found_in_text_alone(tmp_path: Path, name: str, text: str, expected: list[tuple[int, str]]) -> None:
    matches = hits(tmp_path, name, text)
    if isinstance(expected, str):
        assert [rule for _, rule in matches].count("name told") == 3
        assert "said" in [rule for _, rule in matches]
    else:
        assert matches == expected


def test_a_word_may_appear_as_often_as_in_model_projects(tmp_path: Path) -> None:
    file = tmp_path / "a.md"
    file.write_text("Here is a word. " * 5000 + "What is new. " * 2)
    assert language.check([file]).excess() == 0
    file.write_text("Here is a word. " * 5000 + "What is new. " * 4)
    assert language.check([file]).excess() == 1


def test_the_command_prints_hits_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.md").write_text("One is told.\n")
    assert language.main([str(tmp_path)]) == 1
    assert "a.md:1: 'told'" in capsys.readouterr().out
    (tmp_path / "a.md").write_text("It is printed.\n")
    assert language.main([str(tmp_path)]) == 0
