"""Computing over several ranks: the world of ranks, which positions each holds, what is sent."""
