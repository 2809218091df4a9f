"""What the rings are made of: pieces, exchanges and the order of calls."""
