"""Checks that run in separate processes, since they may hang, crash or import slowly."""
