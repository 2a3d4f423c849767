"""Tiny random transformers models with linear attention."""
