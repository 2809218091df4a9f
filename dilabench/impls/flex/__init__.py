"""Dilated attention through FlexAttention."""
