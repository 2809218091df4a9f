"""What torchscale itself imports, and what is recorded of it does not."""
