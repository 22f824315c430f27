"""Levels of a series, with the answers of A/Bs."""

from __future__ import annotations

import math

from groupbench.tracker.stats.walk import Mark, walk

CPU_MS = (0.302, 0.285, 0.293, 0.506, 0.773, 0.709, 0.625, 0.684, 0.738, 0.500, 0.715, 0.713)
"""A CPU kernel that became 2.4 times as slow at place 3, whose first night was too near to begin the level."""


def test_an_ab_inside_a_slowdown_does_not_end_it() -> None:
    same = {10: [Mark("same", 3, None, math.log(0.7))]}
    for marks in ({}, same):
        walked = walk([math.log(ms) for ms in CPU_MS], math.log1p(0.1), 0.17, marks, floor=0.02)
        reference, slower = walked.stack
        assert (reference.start, slower.start) == (0, 4)
        assert math.exp(slower.centre) > 2 * math.exp(reference.centre)


def test_an_ab_with_a_commit_of_the_level_below_ends_a_slowdown() -> None:
    same = {10: [Mark("same", 2, None, math.log(0.3))]}
    walked = walk([math.log(ms) for ms in CPU_MS], math.log1p(0.1), 0.17, same, floor=0.02)
    assert len(walked.stack) == 1
