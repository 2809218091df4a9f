"""Drop-in replacements for the modules of other projects, which need not be installed."""
