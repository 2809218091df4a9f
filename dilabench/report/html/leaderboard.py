"""leaderboard.html: a board per device and family, with what is needed to repeat every row."""

from dilabench.report.html.page import page
from dilabench.report.leaderboard import Leaderboard
from dilabench.version import __version__

FILENAME = "leaderboard.html"


def to_text(found: Leaderboard) -> str:
    """The page; it fetches nothing."""
    return page(
        "leaderboard.html.j2",
        boards=found.boards,
        runs=found.runs,
        run_of={run.run_id: run for run in found.runs},
        version=__version__,
    )
