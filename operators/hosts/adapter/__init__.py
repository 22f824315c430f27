"""TritonBench with our operators and backends in it, and a record of each cell: the one room that knows its inside."""
