"""Suite `ring`: several ranks against one device."""
