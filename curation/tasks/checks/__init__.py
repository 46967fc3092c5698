"""Checks derived from a task's hidden tests, which make verdicts hard to forge.

    hidden test files -> assertions.find -> decoys.make       the same tests with other expectations: who passes one
                       (scopes, values)                       cheats
                                         -> observing.make    the same tests without expectations: they report what they
                                                              saw
                                                              -> expectations.agrees (in the grader's process alone)

proving.py proves on the reference solution that decoys fail and observations agree, and keeps the proven ones. All
other files are pure.
"""
