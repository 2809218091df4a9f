"""Branches that nest, so that the pairs of one are among those of another: chains of them, head by head.

A branch nests in one of a lower rate where its rows are among the other's, and its segments are unions of the other's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dilabench.impls.union.branches import Branch, Place


@dataclass(frozen=True, slots=True)
class Link:
    """One branch of a chain: segment length and rate, the first row of a segment, and the head that it is of."""

    branch: int
    length: int
    rate: int
    place: Place

    def holds(self, other: Link, seq_len: int) -> bool:
        """Whether the other branch of the same head nests in this one, and leaves out some of its rows."""
        sparser = other.rate > self.rate and other.rate % self.rate == 0
        same_rows = (other.place.position - self.place.position) % self.rate == 0
        unions = other.length >= seq_len or other.length % self.length == 0
        return sparser and same_rows and unions and other.length >= self.length


Chain = tuple[Link, ...]


def chains(branches: Sequence[Branch], seq_len: int, least_rows: int) -> list[Chain]:
    """The branches of every head, by rising rate, cut into chains in which each nests in the one before.

    A chain ends where fewer than `least_rows` rows of a branch would lie in one of its shortest segments.
    """
    found: list[Chain] = []
    for head in sorted({place.head for branch in branches for place in branch.places}):
        chain: Chain = ()
        for index, branch in enumerate(branches):
            for place in branch.places:
                if place.head == head:
                    link = Link(index, branch.segment_length, branch.rate, place)
                    if chain and not _goes_on(chain, link, seq_len, least_rows):
                        found.append(chain)
                        chain = ()
                    chain = (*chain, link)
        found.append(chain)
    return found


def _goes_on(chain: Chain, link: Link, seq_len: int, least_rows: int) -> bool:
    shortest = chain[0].length
    worth_it = shortest == link.length or shortest >= least_rows * link.rate
    # Its rows must begin alike in each of the shorter segments.
    regular = all(one.length >= seq_len or one.length % link.rate == 0 for one in chain)
    return worth_it and regular and chain[-1].holds(link, seq_len)
