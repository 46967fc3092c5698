"""Errors that a user reads: one line that names the thing and the fix."""

from __future__ import annotations


class TriplaneError(Exception):
    """Base of every error this project raises on purpose. Its message names the thing and, after a colon or a dash, the fix."""


class ConfigError(TriplaneError):
    """A configuration value is unknown, out of bounds or contradicts another."""


class StoreError(TriplaneError):
    """The artifact store can't be reached, is full, or refuses an operation."""


class ArtifactMissing(StoreError):
    """No committed artifact answers to this key or digest."""


class ArtifactCorrupt(StoreError):
    """A committed artifact's bytes do not match its manifest."""


class SchemaError(TriplaneError):
    """A table, checkpoint or message does not have the form its contract states."""
