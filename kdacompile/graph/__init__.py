"""The functional graph of a Dynamo graph: what patterns match on, every node mapped back."""
