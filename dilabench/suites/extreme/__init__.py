"""Suite `extreme`: the longest sequence that runs."""
