"""The parts of rings: pieces, exchanges and the order of calls."""
