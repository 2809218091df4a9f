"""What is kept between runs: files of a run, the archive of finished ones, its index, baselines, calibrations."""
