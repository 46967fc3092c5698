"""Books of templates: which ones each key's clients have stored, what they take on disk, and what goes to make room.

A derived template takes its patch, and its copies while it has some; its base stays in the same book. Unused copies
make room first, then the least recently used templates. A copy's name is that of its directory, `copy_name`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from contracts.rpc import caller
from envd.server.quotas import Quotas

WHOLE, FILES, VERDICT = "", "files", "verdict"
"""Kinds of copies: a derived template with a repository, a base without one, and a derived template without one."""
_Book = OrderedDict[str, int]


@dataclass
class Removed:
    """What a book let go of, to be removed from the disk."""

    copies: list[str] = field(default_factory=list)
    """Names of copies."""
    templates: list[str] = field(default_factory=list)
    """Templates that no other book lists, derived ones before their bases."""


class Books:
    """One book per key: bytes on disk by template, the least recently used first."""

    def __init__(self, quotas: Quotas | None, bases: Mapping[str, str], busy: Callable[[str], bool]) -> None:
        """quotas: None for no limits. bases: base of each derived template. busy: whether a template must stay."""
        self._quotas, self._bases, self._busy = quotas, bases, busy
        self._books: defaultdict[str, _Book] = defaultdict(OrderedDict)
        self._sizes: dict[str, int] = {}
        self.copies: OrderedDict[str, int] = OrderedDict()
        """Bytes of copies by name, the least recently used first."""

    def use(self, name: str) -> None:
        """Make a template, or a copy of one, the most recently used one."""
        for book in (*self._books.values(), self.copies):
            if name in book:
                book.move_to_end(name)

    def charge(self, digest: str, size: int, *, base: str = "", copy: int = 0, kind: str = "") -> Removed:
        """Charge a template, and its base if it is derived, to the key of the call; return what made room for it.

        size: bytes on disk, for a template that no book lists. copy: bytes of the copy that it gets, of this kind.
        Raises QuotaExceeded, and then changes nothing.
        """
        book = self._books[caller.key()]
        listed = [each for each in (self._bases.get(digest, base), digest) if each]
        new = {each: self._sizes.get(each, size) for each in listed if each not in book}
        removed = self._room(book, sum(new.values()) + copy, len(new)) if new or copy else Removed()
        self._sizes |= new
        for each in listed:
            book[each] = new[each] if each in new else book.pop(each)
        if copy:
            self.copies[copy_name(digest, kind)] = copy
        return removed

    def resize(self, digest: str, size: int) -> None:
        """Charge a template's bytes on disk to every key that has it."""
        self._sizes[digest] = size
        for book in self._books.values():
            if digest in book:
                book[digest] = size

    def forget(self, digest: str) -> None:
        """Remove the charges for a template that could not be stored."""
        self._sizes.pop(digest, None)
        for book in self._books.values():
            book.pop(digest, None)

    def surplus(self, most: int) -> list[str]:
        """Names of unused copies, taken off the books until those that are left take at most `most` bytes."""
        unused = [each for each in self.copies if not self._busy(copied(each))]
        left, gone = sum(self.copies[each] for each in unused), []
        for name in unused:
            if left <= most:
                break
            left -= self.copies.pop(name)
            gone.append(name)
        return gone

    def _room(self, book: _Book, size: int, count: int) -> Removed:
        """Take copies and templates off a book until `count` more of `size` bytes in all fit."""
        if self._quotas is None:
            return Removed()
        rules, most = self._quotas.rules, self._quotas.rules.template_mb << 20
        if size > most:
            self._quotas.refuse("template_mb", f"no template of {size >> 20} MiB (files and git's copy)", "send less")
        copies: dict[str, None] = {}
        templates: dict[str, None] = {}
        left = sum(book.values()) + sum(taken for each, taken in self.copies.items() if copied(each) in book)
        here = len(book)
        for name in [each for each in self.copies if copied(each) in book and not self._busy(copied(each))]:
            if left + size <= most:
                break
            copies[name] = None
            left -= self.copies[name]
        derived = Counter(self._bases[each] for each in book if each in self._bases)
        for digest in (*book, *book):  # a base can go in the second round, if all that is derived from it went
            if left + size <= most and here + count <= rules.templates:
                break
            if digest in templates or derived[digest] or self._busy(digest):
                continue
            templates[digest] = None
            derived[self._bases.get(digest, "")] -= 1
            here -= 1
            left -= book[digest] + sum(self.copies.get(each, 0) for each in names_of(digest) if each not in copies)
        if left + size > most:
            self._quotas.refuse("template_mb", f"{left >> 20} MiB of templates that are in use", "end some sandboxes")
        if here + count > rules.templates:
            self._quotas.refuse("templates", f"{here} templates that are in use", "end some sandboxes")
        return self._let_go(book, list(copies), list(templates))

    def _let_go(self, book: _Book, copies: list[str], templates: list[str]) -> Removed:
        """Take what `_room` chose off the books; return what is to be removed from the disk."""
        for digest in templates:
            del book[digest]
        gone = [each for each in templates if not any(each in other for other in self._books.values())]
        for digest in gone:
            del self._sizes[digest]
        for name in (*copies, *(name for digest in gone for name in names_of(digest))):
            self.copies.pop(name, None)
        return Removed([each for each in copies if copied(each) not in frozenset(gone)], gone)


def copy_name(digest: str, kind: str) -> str:
    """Name of a template's copy of a kind, which is that of its directory."""
    return f"{digest}.{kind}" if kind else digest


def copied(name: str) -> str:
    """Digest of the template that a copy is of."""
    return name.partition(".")[0]


def names_of(digest: str) -> list[str]:
    """Names of all directories that a template may have."""
    return [copy_name(digest, kind) for kind in (WHOLE, FILES, VERDICT)]
