"""A proven region becomes one call of a semantic op in the Dynamo graph."""
