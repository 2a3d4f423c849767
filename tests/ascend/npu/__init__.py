"""A device of type "npu" without one, in a process of its own."""
