"""What this machine can measure, and what would make it measure better."""
