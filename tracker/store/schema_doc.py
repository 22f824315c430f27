"""Generate docs/schema.md: `python -m groupbench.tracker.store.schema_doc > docs/schema.md`."""

from __future__ import annotations

from sqlalchemy import ForeignKey, Table, UniqueConstraint
from sqlalchemy.dialects import sqlite

from groupbench.tracker.store import schema

GLOSSARY = {
    "record": "one measured cell as a line of JSON, as `tritonbench` writes it",
    "run": "one invocation of `tritonbench`; a nightly run is one",
    "cell": "the unit that a run measures once: operator, backend, mode, dtype, shape",
    "series": "a cell on one model of hardware, across all commits; a history belongs to a series",
    "point": "one run's result for one series",
    "burst": "latencies taken back to back; samples of one burst are not independent, but bursts nearly are",
    "environment": "the machine and toolchain of a point; each distinct set of facts is a row",
    "identity": "hash of the facts that affect a latency; points with equal identities are comparable",
    "segment": "consecutive points of a series with one environment identity",
    "comparison": "an A/B comparison: two commits measured alternately on one machine",
    "alert": "a confirmed regression of one series, and its state",
}

_HEAD = """# The database

Generated from `tracker/store/schema.py` by `python -m groupbench.tracker.store.schema_doc > docs/schema.md`;
a test keeps them equal.

Revision {head}. SQLite by default, in WAL mode; PostgreSQL by URL. When a newer groupbench opens an older database, it
migrates the tables in one transaction. It first copies a SQLite file to `FILE.backup-REVISION`. It refuses a database
of a newer revision. All times are UTC.
"""


def page() -> str:
    """Return the whole page."""
    parts = [
        _HEAD.format(head=schema.HEAD),
        "## Words\n",
        *(f"- **{word}**: {meaning}" for word, meaning in GLOSSARY.items()),
    ]
    classes = {mapper.local_table: mapper.class_ for mapper in schema.Base.registry.mappers}
    for table in schema.Base.metadata.sorted_tables:
        meaning = " ".join((classes[table].__doc__ or "").split())
        parts += ["", f"## {table.name}\n", f"{meaning}\n", *_columns(table)]
        parts += _indexes(table)
    return "\n".join(parts) + "\n"


def _columns(table: Table) -> list[str]:
    lines = ["| column | type | meaning |", "|---|---|---|"]
    for column in table.columns:
        kind = column.type.compile(sqlite.dialect()).lower() + ("" if column.nullable else ", not null")
        for key in column.foreign_keys:
            assert isinstance(key, ForeignKey)
            kind += f", → {key.target_fullname}"
        lines.append(f"| `{column.name}` | {kind} | {(column.doc or '').replace('|', chr(92) + '|')} |")
    return lines


def _indexes(table: Table) -> list[str]:
    unique = [tuple(c.columns.keys()) for c in table.constraints if isinstance(c, UniqueConstraint)]
    plain = [tuple(index.columns.keys()) for index in table.indexes]
    parts = [*(f"unique ({', '.join(names)})" for names in sorted(unique))]
    parts += [f"index ({', '.join(names)})" for names in sorted(plain)]
    return ["", "; ".join(parts) + "."] if parts else []


if __name__ == "__main__":
    import sys

    sys.stdout.write(page())
