"""What dilabench ships, registered through the same hooks as a third party's plug-in."""
