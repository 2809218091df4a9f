"""What is alive at one time, step by step: for functions whose fullest moment no closed formula tells."""


class Ledger:
    """Bytes by name, and the most that there ever were at one time."""

    def __init__(self) -> None:
        self.peak = 0.0
        self._held: dict[str, float] = {}

    def hold(self, name: str, size: float) -> None:
        """Something of that name is made; one that was there before is gone once it exists."""
        self.moment(size)
        self._held[name] = size

    def free(self, *names: str) -> None:
        """They are gone; names that hold nothing are no error."""
        for name in names:
            self._held.pop(name, None)

    def moment(self, size: float = 0.0) -> None:
        """So much more, for a moment."""
        self.peak = max(self.peak, sum(self._held.values()) + size)
