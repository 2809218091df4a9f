"""What the samples of one case say."""
