"""The names and help texts of options that both programs have.

The first name is `groupbench`'s, the second is TritonBench's. Both programs accept both.
"""

from __future__ import annotations

OPERATOR = ("--operator", "--op")
BACKEND = ("--backend", "--only")
SHAPE = ("--shape", "--shapes")
DTYPE = ("--dtype", "--precision")

DEVICES = ("auto", "cuda", "cpu")

DEVICE_HELP = "Device to measure on; auto: the GPU if there is one."
DTYPE_DEFAULT = "Default: the operator's first dtype; on a CPU, fp16 if the operator has it."
MODE_HELP = "Mode to measure: fwd, bwd or fwd_bwd. Every operator has fwd."
SEED_HELP = "Seed for the inputs."
PLUGIN_HELP = "Load operators and backends from this plugin; may be repeated."
