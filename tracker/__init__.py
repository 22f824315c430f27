"""What was measured: records, the store, history, judgement and reports. Imports no torch, no kernel, no operator."""
