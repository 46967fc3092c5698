"""Errors of the curation plane."""

import lzma
import tarfile
import zipfile
import zlib

from contracts.errors import TriplaneError

DAMAGED = (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, RuntimeError)
"""What reading a damaged archive raises; RuntimeError: an encrypted zip file, or one of an unknown compression."""


class CurationError(TriplaneError):
    """Base class of errors of the curation plane."""


class GradingIncomplete(CurationError):
    """Too many episodes could not be graded: nothing is committed; verdicts so far are kept."""


class RewardsMismatch(CurationError):
    """Rewards, rollouts and tasks do not belong together."""


class DuplicateRows(CurationError):
    """An episode or a sequence occurs twice in its table, so that joins would multiply rows."""


class TaskError(CurationError):
    """A task or task suite can't be made, or is invalid."""


class TokenizerError(CurationError):
    """A tokenizer can't be trained with these settings."""


class RequestRefused(CurationError):
    """A judge or reward model refused one request, so the component has no value for that episode."""


class MixtureError(CurationError):
    """A source of a mixture has a row that can't be trained on, or none that can."""


class PipelineError(CurationError):
    """A data pipeline's settings, input or functions can't be used."""


def one_line(error: BaseException) -> str:
    """What an error of a library says, on one line of at most 200 characters."""
    return " ".join(str(error).split())[:200] or type(error).__name__
