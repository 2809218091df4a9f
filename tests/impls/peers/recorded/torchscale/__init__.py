"""The signatures of torchscale's main branch, November 2026; what they compute is written anew."""
