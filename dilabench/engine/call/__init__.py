"""One prepared call: its inputs, what is wrapped around it, what it allocates."""
