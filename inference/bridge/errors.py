"""Errors of the bridge. A server names the class in the trailing metadata `triplane-error`, beside the status code.

| error | status |
|---|---|
| BadMessage, RequestTooLong | INVALID_ARGUMENT |
| UnknownEpisode, EpisodeExpired, UnknownTask | NOT_FOUND |
| EpisodeConflict | ALREADY_EXISTS |
| WrongStep, EpisodeEnded, EpisodeDone, StaleVersion | FAILED_PRECONDITION |
| TooManyEpisodes, TooManySteps | RESOURCE_EXHAUSTED |
| Draining, EngineStopped, EngineUnreachable, JournalError, GradingFailed | UNAVAILABLE |
"""

from __future__ import annotations

from inference.errors import InferenceError


class BridgeError(InferenceError):
    """A call to the bridge that it refuses or can't answer."""


class BadMessage(BridgeError):
    """A message that no episode could take: bytes that are no token ids, an id, a bound, an empty command."""


class UnknownEpisode(BridgeError):
    """This key has no such episode: never started, another key's, or ended too long ago."""


class EpisodeExpired(BridgeError):
    """The episode's lease has ended, and its tokens are gone."""


class EpisodeEnded(BridgeError):
    """The episode was ended and takes no more steps."""


class EpisodeDone(BridgeError):
    """The hosted episode is over and takes no more steps; it can be ended."""


class UnknownTask(BridgeError):
    """The bridge hosts no task of this name, or not with this digest."""


class GradingFailed(BridgeError):
    """The verdict on a hosted episode could not be had. The same step, asked again, tries again."""


class EpisodeConflict(BridgeError):
    """The id is in use by an episode that was started with other content."""


class WrongStep(BridgeError):
    """A step that is neither the last one, with the same content, nor the next one."""


class TooManyEpisodes(BridgeError):
    """As many episodes are open as the bridge holds."""


class TooManySteps(BridgeError):
    """More steps run on one stream, or in Step calls of one key, than are allowed."""


class Draining(BridgeError):
    """The bridge ends soon and starts nothing new."""


class JournalError(BridgeError):
    """The journal can't be read or written."""
