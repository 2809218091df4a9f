"""What the rings are made of: pieces, hops and the order of calls."""
