"""Suite `backends`: which dense kernel a device wants."""
