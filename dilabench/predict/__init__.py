"""What a case will need, before anything runs."""
