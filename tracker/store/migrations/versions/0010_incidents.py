"""Add incidents, which alerts belong to. The state and the events of alerts move to them.

Alerts with one range of runs, cause, direction and state become one incident, as `groupbench alerts` grouped them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa
from alembic import op

from groupbench.tracker.store.checksum import checksum_of

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

instant = sa.DateTime(timezone=True)
MOVED = ("state", "until_time", "until_commit")
ADDED = ("incident_id", "ended")

alert = sa.table(
    "alert",
    *(sa.column(name) for name in ("id", "identity", "series_id", "metric", "state", "cause", "base_run_id", "run_id")),
    *(sa.column(name) for name in ("comparison_id", "before", "after", "effect", "low", "high", "until_commit")),
    *(sa.column("opened", instant), sa.column("until_time", instant), sa.column("ended", instant)),
    *(sa.column("incident_id"), sa.column("checksum")),
)
alert_event = sa.table(
    "alert_event",
    *(sa.column(name) for name in ("id", "alert_id", "who", "state", "reason", "checksum")),
    sa.column("at", instant),
)
incident = sa.table(
    "incident",
    *(sa.column(name) for name in ("id", "identity", "state", "owner", "until_commit", "link", "posted", "checksum")),
    *(sa.column("opened", instant), sa.column("until_time", instant)),
)
incident_event = sa.table(
    "incident_event",
    *(sa.column(name) for name in ("id", "incident_id", "who", "state", "reason", "checksum")),
    sa.column("at", instant),
)


def upgrade() -> None:
    op.create_table(
        "incident",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("identity", sa.String, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("owner", sa.String),
        sa.Column("opened", instant, nullable=False),
        sa.Column("until_time", instant),
        sa.Column("until_commit", sa.String),
        sa.Column("link", sa.String),
        sa.Column("posted", sa.String),
        sa.Column("checksum", sa.BigInteger),
        sa.PrimaryKeyConstraint("id", name="pk_incident"),
        sa.UniqueConstraint("identity", name="uq_incident_identity"),
    )
    _events("incident")
    with op.batch_alter_table("alert") as batch:
        batch.add_column(sa.Column("incident_id", sa.Integer))
        batch.add_column(sa.Column("ended", instant))
    _group(op.get_bind())
    op.drop_table("alert_event")
    with op.batch_alter_table("alert") as batch:
        for name in MOVED:
            batch.drop_column(name)
        batch.alter_column("incident_id", nullable=False)
        batch.create_foreign_key("fk_alert_incident_id_incident", "incident", ["incident_id"], ["id"])
    op.create_index("ix_alert_incident_id", "alert", ["incident_id"])
    _seal(op.get_bind(), alert, without=MOVED)


def _events(owner: str) -> None:
    op.create_table(
        f"{owner}_event",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column(f"{owner}_id", sa.Integer, nullable=False),
        sa.Column("at", instant, nullable=False),
        sa.Column("who", sa.String, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("reason", sa.String),
        sa.Column("checksum", sa.BigInteger),
        sa.PrimaryKeyConstraint("id", name=f"pk_{owner}_event"),
        sa.ForeignKeyConstraint([f"{owner}_id"], [f"{owner}.id"], name=f"fk_{owner}_event_{owner}_id_{owner}"),
    )
    op.create_index(f"ix_{owner}_event_{owner}_id", f"{owner}_event", [f"{owner}_id"])


def _group(connection: sa.Connection) -> None:
    """Make the incidents, with the events of their alerts, each only once."""
    events: dict[int, list[sa.RowMapping]] = {}
    for event in connection.execute(sa.select(alert_event).order_by(alert_event.c.at, alert_event.c.id)).mappings():
        events.setdefault(event["alert_id"], []).append(event)
    groups: dict[tuple[Any, ...], list[sa.RowMapping]] = {}
    for row in connection.execute(sa.select(alert).order_by(alert.c.id)).mappings().all():
        worse = None if row["effect"] is None else row["effect"] > 0
        key = row["metric"] == "result", row["base_run_id"], row["run_id"], row["cause"], worse
        groups.setdefault((*key, *(row[name] for name in MOVED)), []).append(row)
    for rows in groups.values():
        first = rows[0]
        facts = {name: first[name] for name in ("identity", *MOVED)}
        facts["opened"] = min(row["opened"] for row in rows)
        connection.execute(sa.insert(incident).values(**facts))
        owner = connection.scalar(sa.select(sa.func.max(incident.c.id)))
        merged = {
            tuple(event[name] for name in ("at", "who", "state", "reason")): None
            for row in rows
            for event in events.get(row["id"], ())
        }
        for at, who, state, reason in sorted(merged, key=lambda each: each[0]):
            values = {"incident_id": owner, "at": at, "who": who, "state": state, "reason": reason}
            connection.execute(sa.insert(incident_event).values(**values))
        ended = max((event[0] for event in merged), default=facts["opened"]) if first["state"] == "fixed" else None
        of_group = sa.update(alert).where(alert.c.id.in_([row["id"] for row in rows]))
        connection.execute(of_group.values(incident_id=owner, ended=ended))
    for table in (incident, incident_event):
        _seal(connection, table)


def _seal(connection: sa.Connection, table: sa.TableClause, without: tuple[str, ...] = ()) -> None:
    """Set the checksum of each row."""
    columns = [column for column in table.c if column.name not in (*without, "checksum")]
    for key, value in _checksums(connection, columns):
        connection.execute(sa.update(table).where(table.c.id == key).values(checksum=value))


def _checksums(connection: sa.Connection, columns: list[Any]) -> Iterator[tuple[int, int]]:
    for row in connection.execute(sa.select(*columns)).mappings().all():
        yield row["id"], checksum_of({name: value for name, value in row.items() if name != "id"})


def downgrade() -> None:
    _events("alert")
    connection = op.get_bind()
    with op.batch_alter_table("alert") as batch:
        batch.add_column(sa.Column("state", sa.String))
        batch.add_column(sa.Column("until_time", instant))
        batch.add_column(sa.Column("until_commit", sa.String))
    rows = connection.execute(
        sa.select(alert.c.id.label("alert"), alert.c.ended, incident).join_from(
            alert, incident, alert.c.incident_id == incident.c.id
        )
    ).mappings()
    for row in rows.all():
        state = "fixed" if row["ended"] is not None else {"confirmed": "new"}.get(row["state"], row["state"])
        values = {"state": state, "until_time": row["until_time"], "until_commit": row["until_commit"]}
        connection.execute(sa.update(alert).where(alert.c.id == row["alert"]).values(**values))
        of_incident = sa.select(incident_event).where(incident_event.c.incident_id == row["id"])
        for event in connection.execute(of_incident.order_by(incident_event.c.id)).mappings().all():
            facts = {name: event[name] for name in ("at", "who", "state", "reason")}
            connection.execute(sa.insert(alert_event).values(alert_id=row["alert"], **facts))
    op.drop_index("ix_alert_incident_id", "alert")
    with op.batch_alter_table("alert") as batch:
        batch.drop_constraint("fk_alert_incident_id_incident", type_="foreignkey")
        for name in ADDED:
            batch.drop_column(name)
        batch.alter_column("state", nullable=False)
    op.drop_table("incident_event")
    op.drop_table("incident")
    _seal(connection, alert, without=ADDED)
    _seal(connection, alert_event)
