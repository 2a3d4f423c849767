"""The Ascend lowering against the real compiler, on a machine without an NPU; see `make test-ascend`."""
