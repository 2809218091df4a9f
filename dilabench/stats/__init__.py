"""Statistics of a benchmark: plain numbers in, verdicts with their reasons out.

One idea per module. No module imports torch, reads a file or uses a record; times are in nanoseconds, effects are
natural logarithms of time ratios (candidate / baseline) until a verdict turns them into ratios.

==================  =====================================================================================
`location`          quantiles, median with an interval that allows for turns and sessions, Vargha-Delaney A12;
                    the relative width of the interval, by which sampling ends
`paired`            rounds that interleave both sides -> `Estimate` of the log ratio (the more reliable route)
`history`           sessions measured at different times -> `Estimate` by the spread between them; the noise floor
`decide`            `Estimate` + `Policy` -> `Verdict` SLOWER, FASTER, SAME or UNDECIDED; Holm over all pairs;
                    how often a verdict comes out
`verdicts`          verdicts as data; a flagged pair is decided by its second measurement
`memory`            the exact memory gate
`steps`             level shifts in a history (L1 Potts)
`scaling`           power laws and crossover lengths, with intervals
==================  =====================================================================================

A comparison in four lines::

    pairs = [PairedRounds(rounds) for rounds in ...]        # rounds[session][round] = (baseline_ns, candidate_ns)
    policy = Policy.for_device("cpu", sigma_aa=0.01)
    verdicts = control_family(judge_many(pairs, policy), policy)  # Holm over all pairs
    failed = [verdict for verdict in verdicts if verdict.fails_gate]

The modules are imported one by one (`from dilabench.stats.decisions.decide import judge_many`), because numpy and
scipy cost more than the whole of `dilabench --help`; `verdicts` costs nothing.
"""
