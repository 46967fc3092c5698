"""Errors of the kernels: one line each, with the thing and the fix."""

from __future__ import annotations


class KernelError(Exception):
    """Base class of this package's errors."""


class KernelUnavailable(KernelError, RuntimeError):
    """The requested kernel can't run on this machine or on these tensors."""


class KernelInputError(KernelError, ValueError):
    """No implementation accepts this shape, dtype or option."""
