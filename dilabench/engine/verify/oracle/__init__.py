"""What is right, in float64: of sampled rows, of inputs that stay where they are, of rows that ranks hold."""
