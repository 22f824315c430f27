"""Add incidents, which alerts belong to. The state and the events of alerts move to them.

Alerts with one range of runs, cause, direction and state become one incident, as `groupbench alerts` grouped them.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

from groupbench.tracker.store.checksum import reflected, seal

revision = "0010"
down_revision = "0009"

instant = sa.DateTime(timezone=True)
MOVED = ("state", "until_time", "until_commit")


def upgrade() -> None:
    op.create_table(
        "incident",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("identity", sa.String, nullable=False, unique=True),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("owner", sa.String),
        sa.Column("opened", instant, nullable=False),
        sa.Column("until_time", instant),
        *(sa.Column(name, sa.String) for name in ("until_commit", "link", "posted")),
        sa.Column("checksum", sa.BigInteger),
    )
    op.create_table(
        "incident_event",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("incident_id", sa.Integer, sa.ForeignKey("incident.id"), nullable=False, index=True),
        sa.Column("at", instant, nullable=False),
        sa.Column("who", sa.String, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("reason", sa.String),
        sa.Column("checksum", sa.BigInteger),
    )
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
    seal(op.get_bind(), "incident", "incident_event", "alert")


def _group(connection: sa.Connection) -> None:
    """Make the incidents, with the events of their alerts, each only once."""
    tables = reflected(connection, "alert", "alert_event", "incident", "incident_event")
    alert, alert_event, incident, incident_event = tables
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
