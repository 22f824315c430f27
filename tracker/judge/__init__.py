"""The verdict on a run: the past of its series, what moved, why, and the alerts that follow."""
