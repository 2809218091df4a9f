"""Recorded from MagiAttention, May 2026."""


class AttnRanges(list):
    @classmethod
    def from_ranges(cls, ranges):
        return cls(ranges)
