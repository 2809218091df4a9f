"""Suite `tiles`."""
