"""dilabench: which way of computing long-context attention is fastest, smallest and right, on this machine."""

__version__ = "0.1.0"
