"""Suite `distributed`: scaling over ranks."""
