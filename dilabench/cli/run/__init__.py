"""`dilabench run` and the commands that plan or use a run."""
