"""Block-sparse attention on one device."""
