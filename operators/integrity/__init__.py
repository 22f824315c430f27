"""Cheating backends, a check of the defences: run all of them and report which mechanism caught each."""
