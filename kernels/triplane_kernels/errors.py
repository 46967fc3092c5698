"""What the kernels refuse, each in one line that names the thing and the fix."""

from __future__ import annotations


class KernelError(Exception):
    """Anything this package refuses."""


class KernelUnavailable(KernelError, RuntimeError):
    """A kernel was asked for that can't run on this machine or on these tensors."""


class KernelInputError(KernelError, ValueError):
    """A shape, dtype or option that no implementation takes."""
