"""Multi-head latent attention: its definition in fp64, where it could be in a graph, and what is claimed about it."""
