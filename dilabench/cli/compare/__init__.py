"""Commands that compare records and keep what they are compared with."""
