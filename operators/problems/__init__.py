"""Published problems as operators: the definitions of FlashInfer-Bench and SOL-ExecBench."""
