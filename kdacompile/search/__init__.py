"""The search of a graph for patterns: what drives the graph, the patterns and the rewrite."""
