"""Statistics of the samples of one case: location, interval, precision, derived figures."""
