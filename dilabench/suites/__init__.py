"""Suites: each expands a request into cases. One small file per suite."""
