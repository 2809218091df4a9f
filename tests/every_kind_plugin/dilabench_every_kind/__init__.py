"""A third party that adds a thing of every kind."""
