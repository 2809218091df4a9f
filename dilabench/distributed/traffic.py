"""Bytes that a rank really sent and received, by kind. What stays on the rank does not count."""

from __future__ import annotations

from collections import Counter


class Traffic:
    """Counters of one rank. The kinds are 'keys' (K and V), 'gradients' (dK and dV), 'heads' (Ulysses), 'whole'."""

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self.operations: Counter[str] = Counter()

    def add(self, kind: str, *, sent: int, received: int) -> None:
        """Count one operation."""
        self.sent[kind] += sent
        self.received[kind] += received
        self.operations[kind] += 1

    def clear(self) -> None:
        """Start from zero."""
        for counter in (self.sent, self.received, self.operations):
            counter.clear()

    def counters(self) -> dict[str, int]:
        """As they stand in a measurement: 'sent_keys_bytes', 'received_keys_bytes' and so on, and the sums."""
        named = {f"sent_{kind}_bytes": count for kind, count in self.sent.items()}
        named |= {f"received_{kind}_bytes": count for kind, count in self.received.items()}
        return named | {"sent_bytes": self.sent.total(), "received_bytes": self.received.total()}
