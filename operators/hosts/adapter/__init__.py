"""Run our operators and backends in TritonBench, and record cells. Only this package uses TritonBench's internals."""
