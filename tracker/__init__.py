"""What was measured: records, store, history, judgement, reports. Imports no torch and no kernels."""
