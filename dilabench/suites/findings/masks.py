"""Pictures of the patterns of a record, one per distinct picture, whatever suite it is of."""

from dilabench.errors import ConfigError
from dilabench.record import RunRecord
from dilabench.report.findings import MaskPlot, Section

# Beyond this a cell of the picture stands for several blocks.
MAX_CELLS = 256


def analyse(record: RunRecord) -> tuple[Section, ...]:
    """A section of pictures; nothing for a record whose patterns have none.

    One whose file is gone or has changed is named in the sentence instead.
    """
    uses = dict.fromkeys(
        (row.case.workload.pattern, shape) for row in record.rows for shape in row.case.workload.shapes
    )
    plots: dict[object, MaskPlot] = {}
    lost: list[str] = []
    for pattern, shape in uses:
        try:
            for picture in pattern.pictures(shape, MAX_CELLS):
                name = _unused(picture.name, {plot.name for plot in plots.values()})
                plots.setdefault(picture, MaskPlot(**{**picture._asdict(), "name": name}))
        except ConfigError as error:
            lost.append(f"The pattern over {shape.length} tokens cannot be drawn: {error}.")
    if not plots and not lost:
        return ()
    count = f"{len(plots)} distinct masks" if len(plots) > 1 else "one mask"
    sentence = " ".join([f"The rows use {count}.", *lost])
    return (Section(title="Masks", sentence=sentence, plots=tuple(plots.values())),)


def _unused(stem: str, taken: set[str]) -> str:
    numbered = (stem if number == 1 else f"{stem}_{number}" for number in range(1, len(taken) + 2))
    return next(name for name in numbered if name not in taken)
