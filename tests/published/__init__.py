"""Published implementations of linear attention and MLA, run through the backend: ``python -m tests.published``."""
