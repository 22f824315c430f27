"""Find the commit responsible for a changed kernel by A/B comparisons."""
