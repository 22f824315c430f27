"""The badge in the JSON format of shields.io's endpoint: https://shields.io/badges/endpoint-badge"""

from __future__ import annotations

import json

from groupbench.tracker.outputs.badge import LABEL, colour, message
from groupbench.tracker.outputs.result import GateResult


def render(result: GateResult) -> str:
    badge = {"schemaVersion": 1, "label": LABEL, "message": message(result), "color": colour(result)}
    badge |= {"isError": True} if result.gate.exit_code else {}
    return json.dumps(badge, ensure_ascii=False) + "\n"
