"""Checks derived from a task's hidden tests, which make verdicts hard to forge.

    hidden test files -> assertions.find -> decoys.make       the same tests with other expectations: who passes one
                                                              cheats
                                         -> observing.make    the same tests without expectations: they report what they
                                                              saw
                                                              -> judging.agrees (in the judge's process alone)

proving.py shows on the reference solution that decoys fail and observations agree, and keeps what it showed. Pure but
for that file.
"""
