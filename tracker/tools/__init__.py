"""Small tools of both programs: git, streams and exit codes, device locks, plots."""
