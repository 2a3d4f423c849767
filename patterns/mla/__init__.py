"""Multi-head latent attention: its definition in fp64, where it could be in a graph, and how a binding is checked."""
