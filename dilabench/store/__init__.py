"""Storage between runs: files of a run, the archive of finished runs, its index, baselines, calibrations."""
