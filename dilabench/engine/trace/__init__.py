"""Peak memory of a case without running it: the implementation itself on tensors without data (torch)."""
