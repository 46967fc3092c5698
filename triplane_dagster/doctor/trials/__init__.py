"""Checks that run in a process of their own, since they may hang, crash or take seconds to import."""
