"""The right results in float64: of sampled rows, of inputs that are not copied, of rows that ranks hold."""
