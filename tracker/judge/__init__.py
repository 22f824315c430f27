"""The verdict on a run: the history of its series, what changed, why, and the resulting alerts."""
