"""Where this user's clients of envd find its server when nobody names an address."""

from __future__ import annotations

from contracts.rpc import meeting
from envd.errors import as_envd_error

KEY_FILE_VARIABLE = "TRIPLANE_ENVD_KEY_FILE"
"""Environment variable: the file with the bearer key of the server that a client without `--key-file` connects to."""


@as_envd_error()
def default_address() -> str:
    """The address of a server that was given none.

    Raises EnvdError where another user could have put a server there.
    """
    return meeting.default_address("envd.sock")
