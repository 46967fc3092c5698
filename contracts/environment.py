"""Environment variables that settings name."""

from __future__ import annotations

VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"
"""Pattern of their names."""
