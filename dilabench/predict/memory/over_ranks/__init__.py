"""Memory of one rank of a parallel call, by formula."""
