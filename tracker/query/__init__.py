"""Questions to the store: which commit, which run, which points, and their history."""
