"""Curves, bars and pictures of patterns as files."""
