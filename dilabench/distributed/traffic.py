"""Bytes that a rank really sent and received, by kind. What stays on the rank does not count."""

from __future__ import annotations

from collections import Counter

from dilabench.metadata import RECEIVED_BYTES, SENT_BYTES, traffic_key


class Traffic:
    """Counters of one rank. The kinds are those of `metadata.TRAFFIC`, or a plug-in's own ('plugin:kind')."""

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
        named = {traffic_key("sent", kind): count for kind, count in self.sent.items()}
        named |= {traffic_key("received", kind): count for kind, count in self.received.items()}
        return named | {SENT_BYTES.key: self.sent.total(), RECEIVED_BYTES.key: self.received.total()}
