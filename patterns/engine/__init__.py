"""A captured region against the recurrence (or the attention) it is taken for, in fp64 on random probes."""
