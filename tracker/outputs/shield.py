"""The badge as shields.io takes it for an endpoint: https://shields.io/badges/endpoint-badge"""

from __future__ import annotations

import json

from groupbench.tracker.outputs.badge import LABEL, colour, message
from groupbench.tracker.outputs.result import Result


def render(result: Result) -> str:
    told = {"schemaVersion": 1, "label": LABEL, "message": message(result), "color": colour(result)}
    told |= {"isError": True} if result.gate.exit_code else {}
    return json.dumps(told, ensure_ascii=False) + "\n"
