"""Suite `range`: growth of time and memory with length."""
