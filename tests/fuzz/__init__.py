"""A fuzzer: programs of the family in many spellings, bent in ways that should not be missed, run beside eager.

``python -m tests.fuzz --minutes 20`` (``--seed``, ``--programs``, ``--processes``) ends with a table. A program whose
results are not eager's is made smaller and written out as a script that needs nothing of the tests.

    sources    functions and classes as the text of a module of its own
    bases      where programs begin: the corpus of spellings, and texts put together from a grammar
    bends      what may be done to a tensor in such a text: windows, small terms, bands, conditions on sizes, ...
    mutations  edits of a text, at places found by running it once
    recipes    a program as data: base, edits, sizes, calls; the n-th program of a seed is always the same
    judge      one program, eager and compiled
    shrink     the smallest recipe that still fails
"""
