"""The first tables: commit, environment, run, series, point."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

instant = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "commit",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("hash", sa.String, nullable=False),
        sa.Column("parents", sa.JSON),
        sa.Column("branch", sa.String),
        sa.Column("time", instant),
        sa.Column("author", sa.String),
        sa.Column("subject", sa.String),
        sa.PrimaryKeyConstraint("id", name="pk_commit"),
        sa.UniqueConstraint("hash", name="uq_commit_hash"),
    )
    op.create_table(
        "environment",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("content", sa.String, nullable=False),
        sa.Column("identity", sa.String, nullable=False),
        sa.Column("device", sa.String, nullable=False),
        sa.Column("gpu", sa.String),
        sa.Column("gpu_uuid", sa.String),
        sa.Column("driver", sa.String),
        sa.Column("cuda", sa.String),
        sa.Column("power_limit_w", sa.Double),
        sa.Column("cpu", sa.String),
        sa.Column("python", sa.String),
        sa.Column("torch", sa.String),
        sa.Column("triton", sa.String),
        sa.Column("helion", sa.String),
        sa.Column("tritonbench", sa.String),
        sa.Column("facts", sa.JSON, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_environment"),
        sa.UniqueConstraint("content", name="uq_environment_content"),
    )
    op.create_index("ix_environment_identity", "environment", ["identity"])
    op.create_table(
        "run",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("uuid", sa.String, nullable=False),
        sa.Column("commit_id", sa.Integer, nullable=False),
        sa.Column("dirty", sa.Boolean, nullable=False),
        sa.Column("started", instant, nullable=False),
        sa.Column("trigger", sa.String, nullable=False),
        sa.Column("plan", sa.String),
        sa.Column("command", sa.String),
        sa.PrimaryKeyConstraint("id", name="pk_run"),
        sa.UniqueConstraint("uuid", name="uq_run_uuid"),
        sa.ForeignKeyConstraint(["commit_id"], ["commit.id"], name="fk_run_commit_id_commit"),
    )
    op.create_index("ix_run_commit_id", "run", ["commit_id"])
    op.create_index("ix_run_started", "run", ["started"])
    op.create_index("ix_run_plan_started", "run", ["plan", "started"])
    op.create_table(
        "series",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("identity", sa.String, nullable=False),
        sa.Column("operator", sa.String, nullable=False),
        sa.Column("backend", sa.String, nullable=False),
        sa.Column("mode", sa.String, nullable=False),
        sa.Column("dtype", sa.String, nullable=False),
        sa.Column("shape", sa.String, nullable=False),
        sa.Column("host", sa.String, nullable=False),
        sa.Column("protocol", sa.String, nullable=False),
        sa.Column("hardware", sa.String, nullable=False),
        sa.Column("seed", sa.BigInteger, nullable=False),
        sa.Column("dims", sa.JSON, nullable=False),
        sa.Column("flops", sa.BigInteger),
        sa.Column("min_bytes", sa.BigInteger),
        sa.PrimaryKeyConstraint("id", name="pk_series"),
        sa.UniqueConstraint("identity", name="uq_series_identity"),
    )
    op.create_index("ix_series_operator_backend", "series", ["operator", "backend"])
    op.create_table(
        "point",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("run_id", sa.Integer, nullable=False),
        sa.Column("series_id", sa.Integer, nullable=False),
        sa.Column("environment_id", sa.Integer, nullable=False),
        sa.Column("content", sa.String, nullable=False),
        sa.Column("status", sa.String, nullable=False),
        sa.Column("message", sa.String),
        sa.Column("baseline", sa.Boolean, nullable=False),
        sa.Column("timing", sa.String),
        sa.Column("median_ms", sa.Double),
        sa.Column("low_ms", sa.Double),
        sa.Column("high_ms", sa.Double),
        sa.Column("error", sa.Double),
        sa.Column("samples", sa.LargeBinary),
        sa.Column("burst_lengths", sa.JSON),
        sa.Column("prepare_ms", sa.Double),
        sa.Column("enqueue_ms", sa.Double),
        sa.Column("telemetry", sa.JSON),
        sa.Column("rms", sa.Double),
        sa.Column("max_abs", sa.Double),
        sa.Column("worst_block_rms", sa.Double),
        sa.Column("mismatch", sa.Double),
        sa.Column("unwritten", sa.Double),
        sa.Column("repeatable", sa.Boolean),
        sa.Column("first_bad", sa.JSON),
        sa.Column("kernel_hash", sa.String),
        sa.Column("kernels", sa.JSON, nullable=False),
        sa.Column("duration_s", sa.Double),
        sa.PrimaryKeyConstraint("id", name="pk_point"),
        sa.UniqueConstraint("run_id", "series_id", name="uq_point_run_id_series_id"),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name="fk_point_run_id_run"),
        sa.ForeignKeyConstraint(["series_id"], ["series.id"], name="fk_point_series_id_series"),
        sa.ForeignKeyConstraint(["environment_id"], ["environment.id"], name="fk_point_environment_id_environment"),
    )
    op.create_index("ix_point_environment_id", "point", ["environment_id"])
    op.create_index("ix_point_series_id_run_id", "point", ["series_id", "run_id"])


def downgrade() -> None:
    for table in ("point", "series", "run", "environment", "commit"):
        op.drop_table(table)
