"""Problems that others have published: FlashInfer-Bench and SOL-ExecBench definitions as operators."""
