"""Where a server and the clients of the same user find each other when nobody names an address: a directory that only
this user can enter.

DIR/envd.sock        the socket of a server that was given no address, here of envd
DIR/port-7070.key    the key of a server on that port of loopback that was given none

DIR: $XDG_RUNTIME_DIR/triplane, else /run/triplane for root, else /tmp/triplane-UID.
"""

from __future__ import annotations

import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path

from contracts.errors import ConfigError, describe

_KEY_BYTES = 24


def meeting_directory() -> Path:
    """The directory, whether it is there or not."""
    user = os.geteuid()
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime.startswith("/") and _owner(Path(runtime)) == user:
        return Path(runtime, "triplane")
    return Path("/run/triplane") if user == 0 else Path(f"/tmp/triplane-{user}")


def default_address(socket: str) -> str:
    """The address of a server that was given none. socket: its file in the directory.

    Raises ConfigError where another user could have put a server there.
    """
    directory = meeting_directory()
    if directory.is_symlink() or directory.exists():
        _check(directory)
    return f"unix:{directory}/{socket}"


def make_meeting_directory() -> Path:
    """Make the directory, mode 0700. Raises ConfigError where it can't be made, or is not this user's alone."""
    directory = meeting_directory()
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"no directory for the default socket and keys ({describe(error)}), or name --listen unix:/path, or"
            " --key-file"
        ) from error
    _check(directory)
    return directory


@dataclass(frozen=True)
class MadeKey:
    """A bearer key that a server made for itself."""

    key: str
    name: str
    """What it opens, for the file's name: `port` or `mcp`."""

    @classmethod
    def fresh(cls, name: str = "port") -> MadeKey:
        """A new random key."""
        return cls(secrets.token_urlsafe(_KEY_BYTES), name)

    def publish(self, port: int) -> Path:
        """Write the key where this user's clients look for it, mode 0600, in place of an older server's.

        Raises ConfigError.
        """
        file = make_meeting_directory() / f"{self.name}-{port}.key"
        draft = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
        try:
            fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(fd, "w") as opened:
                opened.write(self.key + "\n")
            draft.rename(file)
        except OSError as error:
            raise ConfigError(f"the server's key can't be written: {describe(error)}") from error
        return file

    def withdraw(self, file: Path) -> None:
        """Remove the file, unless another server has put its own key there."""
        try:
            if file.read_text().strip() == self.key:
                file.unlink()
        except OSError:
            pass  # it is gone, or unreadable: nothing of ours


def key_file_for(port: int) -> Path | None:
    """The file with the key of this user's server on that port of loopback; None where there is none."""
    directory = meeting_directory()
    file = directory / f"port-{port}.key"
    return file if _owner(directory) == os.geteuid() and file.is_file() else None


def _owner(directory: Path) -> int | None:
    try:
        about = directory.lstat()
    except OSError:
        return None
    return about.st_uid if stat.S_ISDIR(about.st_mode) else None


def _check(directory: Path) -> None:
    about = directory.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) & 0o077:
        raise ConfigError(
            f"{directory} must be a directory of this user's own with mode 0700: remove it, or name --listen"
            " (--address) unix:/path"
        )
