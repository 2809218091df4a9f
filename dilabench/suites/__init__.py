"""Suites: each turns a request into cases. One small file per suite."""
