"""The operators: inputs, shapes, reference and backends of each."""
