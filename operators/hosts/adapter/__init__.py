"""Run our operators and backends in TritonBench, and record each cell. Only this package uses its internals."""
