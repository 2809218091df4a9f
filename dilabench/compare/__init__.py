"""Comparisons of measured cases: which rows face each other, and what can be said of each pair.

================  ===========================================================================================
`fingerprint`     may two records be compared at all? hard fields refuse, soft ones warn
`pairing`         slots of two cases that took turns -> rounds (`stats.paired`)
`within`          rows of one record (or several of the same request) against each other, by interleaved rounds
`across`          two records joined on `case_id`, by the spread of the stored sessions
`comparison`      what comes out: compared cells, and by name every row that has no counterpart
`gate`            exit code of a comparison, and the second look at flagged cells
`selection`       `-k`: the cases that a text names
================  ===========================================================================================

Nothing here reads files or imports torch.
"""
