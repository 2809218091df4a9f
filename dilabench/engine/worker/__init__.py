"""Worker processes: what is said to them, and how they start, answer and end."""
