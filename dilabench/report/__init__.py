"""Renderings of a run record."""
