"""Add the files and the packages that measured processes loaded. Those of earlier points are unknown."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

COLUMNS = ("code_id", "packages_id")

ADDITIONS = (
    "ALTER TABLE point ADD COLUMN code_id INTEGER CONSTRAINT fk_point_code_id_loaded_list REFERENCES loaded_list (id)",
    "ALTER TABLE point ADD COLUMN packages_id INTEGER "
    "CONSTRAINT fk_point_packages_id_loaded_list REFERENCES loaded_list (id)",
)


def upgrade() -> None:
    op.create_table(
        "loaded_list",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("content", sa.String, nullable=False),
        sa.Column("items", sa.JSON),
        sa.PrimaryKeyConstraint("id", name="pk_loaded_list"),
        sa.UniqueConstraint("content", name="uq_loaded_list_content"),
    )
    for statement in ADDITIONS:  # Alembic would copy the whole table on SQLite, which can add such a column at once
        op.execute(statement)


def downgrade() -> None:
    with op.batch_alter_table("point") as batch:
        for name in COLUMNS:
            batch.drop_constraint(f"fk_point_{name}_loaded_list", type_="foreignkey")
            batch.drop_column(name)
    op.drop_table("loaded_list")
