"""leaderboard.html: a board per device and family, with what is needed to repeat every row."""

import dilabench
from dilabench.report.html.page import page
from dilabench.report.leaderboard import Leaderboard

FILENAME = "leaderboard.html"


def to_text(found: Leaderboard) -> str:
    """The page; it fetches nothing."""
    return page(
        "leaderboard.html.j2",
        boards=found.boards,
        runs=found.runs,
        run_of={run.run_id: run for run in found.runs},
        version=dilabench.__version__,
    )
