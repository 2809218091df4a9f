#!/bin/bash
# Joins the shards of a job array, once all its tasks are done: sbatch --dependency=afterok:JOB slurm_merge.sh JOB
#SBATCH --job-name=dilabench-merge
#SBATCH --time=00:05:00
set -euo pipefail
merged="results/$1-merged"
dilabench merge "results/$1"/* --output "$merged"
dilabench report "$merged"/*
