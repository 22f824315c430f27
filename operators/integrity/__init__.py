"""Backends that cheat, and what catches each: the exploit suite behind `groupbench selftest --integrity`."""
