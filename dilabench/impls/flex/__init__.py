"""Any pattern through FlexAttention."""
