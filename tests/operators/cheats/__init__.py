"""The rest of the cheats, of which `groupbench.operators.integrity` has one of each kind."""

from cheats import forged, reaching, stale, tampered, unfinished
from groupbench.operators.integrity.cheat import backends
from groupbench.operators.integrity.cheats import CHEATS as SHOWN

CHEATS = (*SHOWN, *stale.CHEATS, *unfinished.CHEATS, *forged.CHEATS, *tampered.CHEATS, *reaching.CHEATS)
BACKENDS = backends(CHEATS)
"""The cheats as a plugin: `--plugin cheats.BACKENDS`."""
