"""Activations written inside a loop are taken in front of it, proven equal; put back if nothing new is recognised."""
