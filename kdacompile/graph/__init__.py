"""The functional shadow of a Dynamo graph: what patterns match on, every node mapped back."""
