"""From estimates to verdicts: slower, faster, same or inconclusive."""
