"""Suite `billion`: 2^30 tokens, really computed."""
