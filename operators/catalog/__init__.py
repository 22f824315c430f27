"""The operators: inputs, shapes, reference and backends."""
