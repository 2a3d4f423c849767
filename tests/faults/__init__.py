"""Fault injection: an error at any function boundary of ours leaves the user with what torch alone gives.

``python -m tests.faults`` raises at each in turn; ``tests/faults/test_faults.py`` takes a sample.
"""
