"""The verdict on a run: the history of its series, the changes with their causes, and the resulting alerts."""
