"""One execution of a plan (`suites.planner`) to its record, for the command line and for `dilabench.run()`. No torch.

execute: one run from its plan to its exit code. execution: plan -> record: header, folder, measuring, reports.
resume: continuing a run, and the budget for its remaining cases. machine_state: what makes times noisy or wrong.
against_baseline: the gate: a baseline's cases, measured again until decided. remeasure: a record's cases, measured
again. calibration: a machine's noise between sessions. memory: the cases of `plan`, traced peaks next to measured ones.
verification: the cases of `verify`.
"""

from pathlib import Path

# Gets a folder for each run.
DEFAULT_FOLDER = Path("benchmark_results")
