"""Commands for authors of plug-ins: `plugin new` and `plugin check`. `templates/`: the packages that `new` writes."""
