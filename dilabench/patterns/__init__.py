"""Patterns: who sees whom. One file per kind."""
