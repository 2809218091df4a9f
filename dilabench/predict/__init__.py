"""Predictions of a case's memory and time, before anything runs."""
