"""Alembic's entry point: run migrations on the connection and in the transaction of `store.migrate`."""

from __future__ import annotations

from alembic import context

from groupbench.tracker.store.schema import Base

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=Base.metadata, render_as_batch=True)
context.run_migrations()
