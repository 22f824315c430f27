"""Find words that make the text of this repository hard to read, and print them by file and line.

    python ci/language.py                       the whole repository
    python ci/language.py tracker/judge docs    files or folders
    python ci/language.py --summary             the counts alone

Checked are comments, docstrings, text in string literals (help, errors, labels), Markdown, HTML templates and the
comments of YAML, TOML, shell, CSS and JavaScript; in Python also the names that code binds. `RULES` lists what may not
appear, and how often a word may appear that is fine now and then: as often as in the most frequent of quack, Helion's
autotuner, asv, sqlite-utils and sqlalchemy.orm. The exit status is 1 when there are more hits than these limits allow.
tests/test_language.py runs the same check on every folder of the repository.
"""

from __future__ import annotations

import argparse
import ast
import math
import os
import re
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# How many words a sentence may have: half of all sentences, and nine of ten.
MEDIAN_WORDS, P90_WORDS = 18, 30

CHAINS = {"of": 30.0, "that": 11.0, "its": 4.0}
"""How often docstrings may have these words, per 1,000: write "tuned-config key", not "the key of a tuned config"."""


@dataclass(frozen=True)
class Text:
    """One comment block, docstring, string literal or page, with the line it begins at."""

    path: Path
    line: int
    kind: str  # comment, docstring, string, page or name
    body: str

    def lines_of(self, pattern: re.Pattern[str]) -> Iterator[tuple[int, str]]:
        """Yield the line and the text of every match of `pattern`."""
        for match in pattern.finditer(self.body):
            yield self.line + self.body.count("\n", 0, match.start()), " ".join(match[0].split())


@dataclass(frozen=True)
class Rule:
    """A pattern, what to write instead, and how often it may appear per 10,000 words."""

    name: str
    pattern: re.Pattern[str]
    instead: str
    per_10k: float = 0.0
    kinds: tuple[str, ...] = ("comment", "docstring", "string", "page")

    def allowed(self, words: int) -> int:
        """Return how often the rule may match in a text of this number of words."""
        return math.ceil(self.per_10k * words / 10_000)


@dataclass(frozen=True)
class Hit:
    """One place where a rule matches."""

    path: Path
    line: int
    rule: Rule
    words: str

    def __str__(self) -> str:
        path = self.path.relative_to(ROOT) if self.path.is_relative_to(ROOT) else self.path
        return f"{path}:{self.line}: {self.words!r} ({self.rule.name}): {self.rule.instead}"


def _rule(name: str, pattern: str, instead: str, per_10k: float = 0.0) -> Rule:
    # A capital letter may begin the match; the rest is lower case: `is None` and NONE are Python's and C's.
    first = re.sub(r"^(\(\?:)?([a-z])", lambda m: f"{m[1] or ''}[{m[2]}{m[2].upper()}]", pattern)
    spaced = first.replace(" ", r"\s+")
    return Rule(name, re.compile(rf"\b(?:{spaced})\b"), instead, per_10k)


def _opening(words: str) -> Rule:
    pattern = re.compile(rf"\A\s*(?:{words})\b.{{0,30}}")
    return Rule("fragment", pattern, "begin with a sentence that stands alone: Return the …", 0.0, ("docstring",))


def _name(name: str, words: str, per_10k: float = 0.0) -> Rule:
    return Rule(name, re.compile(rf"^(?:{words})$"), "name what the value holds", per_10k, ("name",))


RULES = (
    _rule("told", "told", "reported, printed, listed, passed"),
    _rule("said", "said", "reported, printed, stated"),
    _rule("reckoned", r"reckon\w*", "computed, counted"),
    _rule("mended", r"mend(?:s|ed|ing)?", "fixed, repaired"),
    _rule("anew", "anew", "again, from scratch"),
    _rule("meanwhile", "meanwhile", "while …, during this time"),
    _rule("beside", "beside", "next to, in addition to, with"),
    _rule("whoever", "whoever", "anyone who, the caller, the user"),
    _rule("gravest", "gravest", "most severe"),
    _rule("aloud", "aloud", "printed, reported"),
    _rule("nobody", "nobody", "no one; name who or what does not"),
    _rule("is none", r"(?:is|are|was|were|has|have|holds?|gives?|names?|there) none", "there is no …, None, not a …"),
    _rule("what is no", "what (?:is|are) (?:no|not|none)", "not a …; anything else"),
    _rule("like sides", "like sides?", "A/A comparison"),
    _rule("far off", "far off", "outlier, wrong"),
    _rule("of the order of", "of the order of", "about, for the order of"),
    _rule("no x is of", r"no \w+ is of", "there is no …"),
    _opening("Of|Where|What|How|That|Who|Whose|Why|As"),
    _name("name told", "_?(?:told|said|mine|theirs)"),
    _name("name found", "_?(?:found|given|asked|answer|own|known)", 16.0),
    _rule("says", "says", "reports, states, returns", 0.8),
    _rule("what is", "what (?:is|a|an|it)", "name the thing", 1.0),
    _rule("what", "what", "name the thing: the inputs, the values, the commits that …", 5.1),
    _rule("where it", "where (?:it|they|there)", "if, when", 1.5),
    _rule("stands", "stands?|lies", "is, is stored, is in", 0.9),
    _rule("is no", "(?:is|are) no", "there is no …, is not a …", 3.0),
)

_BY_KIND = {
    kind: tuple(rule for rule in RULES if kind in rule.kinds)
    for kind in ("comment", "docstring", "string", "page", "name")
}

GENERATED = "<!-- Generated by "
"""With this a page begins that a program writes."""

# Code inside prose is not checked.
_QUOTED = re.compile(r"``?[^`\n]+``?")
_SQL = re.compile(r"\s*(SELECT|WITH|INSERT|UPDATE|DELETE|CREATE)\b")
_WORD = re.compile(r"[A-Za-z][A-Za-z'’-]*")
_SKIPPED = {
    *(".git", ".venv", "venv", "build", "__pycache__"),
    *(".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache"),
}
_HASH = {".yml", ".yaml", ".toml", ".sh", ".txt", ""}
_SLASHES = {".js", ".css"}
_THIS = {"ci/language.py", "tests/test_language.py"}


def files(paths: Iterable[Path]) -> list[Path]:
    """Return the files below `paths` that hold text to check."""
    known = {".py", ".md", ".html", *_HASH, *_SLASHES}
    every: list[Path] = []
    for path in paths:
        every += [path] if path.is_file() else sorted(_below(path))
    return [f for f in every if f.suffix in known and f.is_file() and not any(f.match(this) for this in _THIS)]


def _below(folder: Path) -> Iterator[Path]:
    """Give the files below a folder, without entering those to skip: an environment has a hundred thousand."""
    for parent, folders, names in os.walk(folder):
        folders[:] = set(folders) - _SKIPPED
        yield from (Path(parent, name) for name in names if name not in _SKIPPED)


def texts(path: Path) -> list[Text]:
    """Return all text of a file: prose, and the names that Python code binds."""
    if path.suffix in _HASH and (path.suffix or path.name in ("Dockerfile",)):
        return list(_commented(path, path.read_text()))
    try:
        source = path.read_text()
    except UnicodeDecodeError:
        return []
    if path.suffix == ".py":
        return list(_python(path, source))
    if path.suffix == ".md":
        if GENERATED in source:  # the code that it comes from is checked
            return []
        return [
            _page(path, source, ((r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL), (r"^\|[-| :]+\|$", re.MULTILINE)))
        ]
    if path.suffix == ".html":
        shown = re.sub(r"\b(?:title|placeholder|alt|aria-label)=(\"|')(.*?)\1", r"> \2. <", source)
        scripts, tags = r"<(script|style)\b.*?</\1>", r"\{%.*?%\}|\{\{.*?\}\}|<[^>]*>"
        return [_page(path, shown, ((scripts, re.DOTALL), (tags, re.DOTALL)))]
    if path.suffix in _SLASHES:
        comment = re.compile(r"/\*.*?\*/|(?<![:'\"])//[^\n]*|\"[^\"\n]* [^\"\n]* [^\"\n]*\"", re.DOTALL)
        return [Text(path, source.count("\n", 0, m.start()) + 1, "comment", m[0]) for m in comment.finditer(source)]
    return []


def _page(path: Path, source: str, blanked: Iterable[tuple[str, int]]) -> Text:
    for pattern, flags in blanked:
        source = re.sub(pattern, lambda m: "\n" * m[0].count("\n"), source, flags=flags)
    return Text(path, 1, "page", _QUOTED.sub("x", source))


def _commented(path: Path, source: str) -> Iterator[Text]:
    block: list[str] = []
    for number, line in enumerate([*source.split("\n"), ""], 1):
        marker = re.search(r"(?:^|\s)#(?!!)", line)
        if marker:
            block.append(line[marker.end() :])
        elif block:
            yield Text(path, number - len(block), "comment", _QUOTED.sub("x", "\n".join(block)))
            block = []
        if not marker:
            for string in re.findall(r"\"[^\"$]* [^\"]* [^\"]*\"|: [A-Z].* .*", line):
                yield Text(path, number, "string", _QUOTED.sub("x", string))


def _python(path: Path, source: str) -> Iterator[Text]:
    lines = source.split("\n")
    docstrings: set[int] = set()
    parts: set[int] = set()
    strings: list[ast.Constant | ast.JoinedStr] = []
    for node in _nodes(ast.parse(source)):
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str):
                strings.append(node)
            continue
        if isinstance(node, ast.JoinedStr):
            parts |= {id(part) for part in ast.walk(node) if part is not node}
            strings.append(node)
            continue
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                docstrings.add(id(first.value))
        if name := _bound(node):
            yield Text(path, getattr(node, "lineno", 1), "name", name)
    for string in strings:
        _blank(lines, string)
        if id(string) not in parts:
            yield from _literal(path, string, "docstring" if id(string) in docstrings else "string")
    yield from _comments(path, lines)


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a tree as `ast.walk` does, but sooner: without those that say how a name is used."""
    nodes = [tree]
    for node in nodes:
        yield node
        for field in node._fields:
            value = getattr(node, field, None)
            if isinstance(value, list):
                nodes += [part for part in value if isinstance(part, ast.AST)]
            elif isinstance(value, ast.AST) and field != "ctx":
                nodes.append(value)


def _blank(lines: list[str], node: ast.expr) -> None:
    """Overwrite a string in `lines`, so that no `#` is left in them but those of comments."""
    first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
    for row in range(first, last + 1):
        line = lines[row]
        if "#" in line:
            if not line.isascii():
                line = "".join(char if char.isascii() else "?" * len(char.encode()) for char in line)
            begin = node.col_offset if row == first else 0
            end = node.end_col_offset or 0 if row == last else len(line)
            lines[row] = line[:begin] + "_" * (end - begin) + line[end:]


def _comments(path: Path, lines: list[str]) -> Iterator[Text]:
    block: list[str] = []
    for number, line in enumerate([*lines, ""], 1):
        code, marker, comment = line.partition("#")
        own_line = bool(marker) and not code.strip()
        if block and not own_line:
            yield Text(path, number - len(block), "comment", _QUOTED.sub("x", "\n".join(block)))
            block = []
        if own_line:
            block.append(comment)
        elif marker:
            yield Text(path, number, "comment", _QUOTED.sub("x", comment))


def _literal(path: Path, node: ast.Constant | ast.JoinedStr, kind: str) -> Iterator[Text]:
    if isinstance(node, ast.JoinedStr):
        value = "".join(str(part.value) if isinstance(part, ast.Constant) else "x" for part in node.values)
    else:
        value = str(node.value)
    if kind == "docstring" or (value.count(" ") >= 2 and not _SQL.match(value)):
        yield Text(path, node.lineno, kind, _QUOTED.sub("x", value))


def _bound(node: ast.AST) -> str | None:
    """Return the name that a node binds."""
    if isinstance(node, ast.Name):
        return node.id if isinstance(node.ctx, ast.Store) else None
    if isinstance(node, ast.arg):
        return node.arg
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name
    return node.asname if isinstance(node, ast.alias) else None


@dataclass(frozen=True)
class Report:
    """The hits in some files, and how much text these hold."""

    hits: tuple[Hit, ...]
    words: int
    names: int
    sentences: tuple[int, ...]  # the number of words of each, in ascending order

    def counts(self) -> dict[Rule, int]:
        """Return the number of hits of each rule."""
        counter = Counter(hit.rule for hit in self.hits)
        return {rule: counter[rule] for rule in RULES}

    def size(self, rule: Rule) -> int:
        """Return the number of words, or names, that a rule is checked on."""
        return self.names if rule.kinds == ("name",) else self.words

    def excess(self) -> int:
        """Return the number of hits beyond what the rules allow."""
        return sum(max(0, count - rule.allowed(self.size(rule))) for rule, count in self.counts().items())

    def median(self) -> float:
        """Return the median number of words of a sentence."""
        return statistics.median(self.sentences) if self.sentences else 0

    def p90(self) -> int:
        """Return the number of words that nine of ten sentences do not exceed."""
        return self.sentences[int(0.9 * (len(self.sentences) - 1))] if self.sentences else 0


def check(paths: Iterable[Path]) -> Report:
    """Check the files below `paths`."""
    hits: list[Hit] = []
    words = names = 0
    sentences: list[int] = []
    for path in files(paths):
        for text in texts(path):
            if text.kind == "name":
                names += 1
            elif text.kind != "string":
                words += len(_WORD.findall(text.body))
                sentences += _lengths(text.body)
            for rule in _rules_of_name(text.body) if text.kind == "name" else _BY_KIND[text.kind]:
                hits += [Hit(path, line, rule, match) for line, match in text.lines_of(rule.pattern)]
    return Report(tuple(hits), words, names, tuple(sorted(sentences)))


@cache
def _rules_of_name(name: str) -> tuple[Rule, ...]:
    """Return the rules that a name breaks. The same few names make up most of the code."""
    return tuple(rule for rule in _BY_KIND["name"] if rule.pattern.search(name))


def _lengths(body: str) -> list[int]:
    """Return the number of words of each sentence; a list item ends one too, tables and headings have none."""
    prose = re.sub(r"^\s*[|#].*$", "", body, flags=re.MULTILINE)
    sentences = re.split(r"[.!?](?=\s|$)|\n\s*\n|\n\s*(?=(?:[-*]|\d+\.) )", prose)
    lengths = [len(_WORD.findall(sentence)) for sentence in sentences]
    return [length for length in lengths if length >= 3]


def summary(report: Report) -> str:
    """Return the counts of every rule as text."""
    lines = [f"{'rule':18} {'hits':>6} {'per 10k':>8} {'limit':>6}"]
    for rule, count in sorted(report.counts().items(), key=lambda item: -item[1]):
        lines.append(f"{rule.name:18} {count:6} {1e4 * count / max(report.size(rule), 1):8.1f} {rule.per_10k:6.1f}")
    lines.append(
        f"{report.words} words; sentences: median {report.median():g} words (limit {MEDIAN_WORDS}), "
        f"nine of ten up to {report.p90()} (limit {P90_WORDS})"
    )
    lines.append(f"{report.excess()} hits above the limits")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Print the hits and the summary; return 1 when there are more hits than the limits allow."""
    parser = argparse.ArgumentParser(prog="language.py", description="Find words that make text hard to read.")
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH", help="Files or folders [the whole repository].")
    parser.add_argument("--summary", action="store_true", help="Print the counts alone.")
    options = parser.parse_args(arguments)
    for path in options.paths:
        if not path.exists():
            parser.error(f"{path}: there is no such file or folder")
    report = check([path.resolve() for path in options.paths] or [ROOT])
    if not options.summary:
        for hit in report.hits:
            print(hit)
    print(summary(report))
    return 1 if report.excess() else 0


if __name__ == "__main__":
    sys.exit(main())
