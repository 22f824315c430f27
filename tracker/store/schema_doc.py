"""`docs/schema.md` from the tables: `python -m groupbench.tracker.store.schema_doc > docs/schema.md`."""

from __future__ import annotations

from sqlalchemy import ForeignKey, Table, UniqueConstraint
from sqlalchemy.dialects import sqlite

from groupbench.tracker.store import schema

GLOSSARY = {
    "record": "one measured cell as a line of JSON, as the measuring side writes it",
    "run": "one invocation of the measuring side; a night is a run",
    "cell": "what a run measures once: operator, backend, mode, dtype, shape",
    "series": "a cell on one model of hardware, whatever the code: what a history is of",
    "point": "one run's result for one series",
    "burst": "latencies taken in a row; samples of one burst are not independent, bursts are nearly so",
    "environment": "where a point was measured; every distinct set of facts is a row",
    "identity": "hash of the facts that move a latency; points are compared where it is equal",
    "segment": "a stretch of a series in one environment identity",
    "comparison": "an A/B: two commits measured in turns on one machine",
    "alert": "a change for the worse of one series that was confirmed, and what became of it",
}

_HEAD = """# The database

Made from `tracker/store/schema.py` by `python -m groupbench.tracker.store.schema_doc > docs/schema.md`;
a test keeps them equal.

Revision {head}. SQLite by default, in WAL mode; PostgreSQL by URL. Migrations run when an older database is opened by
a newer groupbench, in one transaction, and leave a copy of a SQLite file beside it as `FILE.backup-REVISION`. A
database of a newer revision is refused. Times of day are UTC.
"""


def page() -> str:
    """The whole page."""
    parts = [
        _HEAD.format(head=schema.HEAD),
        "## Words\n",
        *(f"- **{word}**: {said}" for word, said in GLOSSARY.items()),
    ]
    classes = {mapper.local_table: mapper.class_ for mapper in schema.Base.registry.mappers}
    for table in schema.Base.metadata.sorted_tables:
        said = " ".join((classes[table].__doc__ or "").split())
        parts += ["", f"## {table.name}\n", f"{said}\n", *_columns(table)]
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
    told = [*(f"unique ({', '.join(names)})" for names in sorted(unique))]
    told += [f"index ({', '.join(names)})" for names in sorted(plain)]
    return ["", "; ".join(told) + "."] if told else []


if __name__ == "__main__":
    import sys

    sys.stdout.write(page())
