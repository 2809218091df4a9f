"""Renderings of a run record: `render(record, folder) -> str | None`, one module per form.

`rows` decides what is shown and in which words, so that the terminal table and the Markdown report cannot disagree.
Everything is derived from raw samples when it is shown, and rounded only here.
"""
