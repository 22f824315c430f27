"""A run of what groupbench.toml holds: starting `tritonbench`, and the files of records that survive an interrupt."""
