"""Errors of the curation plane."""

from contracts.errors import TriplaneError


class CurationError(TriplaneError):
    """Any failure of the curation plane."""


class GradingIncomplete(CurationError):
    """Too many episodes could not be graded: nothing is committed, verdicts reached so far are kept and found again."""


class RewardsMismatch(CurationError):
    """Rewards, rollouts and tasks do not belong together."""


class DuplicateRows(CurationError):
    """An episode or a sequence that is in its table twice: joins on it would multiply rows."""


class TaskError(CurationError):
    """A task or a task suite that can't be made, or is not what it claims to be."""


class TokenizerError(CurationError):
    """A tokenizer that can't be trained as asked."""


class RequestRefused(CurationError):
    """A judge or reward model won't answer this one request: the component has no value there."""
