"""Other texts of the same graph, each put back if nothing new is recognised in it.

What a loop does to every token alike in front of it or behind it, sequences of a packed batch apart, row sums of scores
as a column.
"""
