"""The device: clocks, lock, environment, peaks."""
