"""Facts that every part shares: records, identities, metrics, verdicts, exit codes, limits of the hardware."""
