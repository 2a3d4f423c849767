"""The linear-attention family: its definition, where it could be in a graph, and what is absorbed into the op."""
