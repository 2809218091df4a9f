#!/bin/bash
# One task of a job array measures one shard: sbatch slurm_shards.sh range --range production
#SBATCH --job-name=dilabench
#SBATCH --array=1-4
#SBATCH --gres=gpu:1
#SBATCH --exclusive
#SBATCH --time=01:00:00
set -euo pipefail
dilabench run "$@" --shard "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT" --budget 50m \
    --output "results/$SLURM_ARRAY_JOB_ID"
