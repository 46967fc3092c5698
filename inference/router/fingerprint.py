"""Fingerprints of prompts: one 64-bit hash for each prefix of whole blocks.

With pairs of tokens t, keyed odd a and c, and the namespace's hash N, modulo 2**64:

    s = a' + sum_j a_j (t_2j + 2**32 t_2j+1)    l = s ^ (s >> 32)     of a block
    p_i = N + sum_{k <= i} c_k l_k                                    of the prefix that ends with block i

Pairs need half the products, and no copy of the tokens. Blocks that differ in one token never have equal sums; those
that differ in several tokens, only at odd places and by multiples of 2**v, have with probability 2**(v - 31) at most.
Two prefixes of equal hash cost a wrong route, never a wrong token: engines compare tokens or their own hashes.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np
import numpy.typing as npt

from inference.errors import RouterError

Tokens = Sequence[int] | npt.NDArray[np.integer]
_TOKEN, _PAIR = np.dtype("<i4"), np.dtype("<u8")
_FOLD = np.array(32, np.uint64)
"""An array: numpy converts a scalar at each use."""


@dataclass(frozen=True)
class Namespace:
    """What cached state depends on besides the tokens. State of one namespace is useless in another."""

    policy: str
    """Policy version."""
    tokenizer: str = ""
    adapter: str = ""
    recipe: str = ""
    """Forward recipe, as in the manifest of a checkpoint."""
    salt: str = ""

    @property
    def value(self) -> int:
        """64-bit hash."""
        return hash64("\0".join(f"{len(part)}:{part}" for part in astuple(self)))


@functools.lru_cache(4096)
def hash64(text: str) -> int:
    """64-bit hash of a text, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class Fingerprinter:
    """Hashes prompts by blocks of `block_tokens` tokens. Equal settings give equal hashes in every process."""

    def __init__(self, block_tokens: int, key: str = "") -> None:
        """key: secret of the routers of a fleet; without it, anybody can construct prompts of equal hash."""
        if block_tokens < 1:
            raise RouterError(f"block_tokens={block_tokens}: must be at least 1, the block size of the engines")
        self.block_tokens = block_tokens
        odd = _odd(f"tokens {key}", 1 + (block_tokens + 1) // 2)
        self._shift, self._pairs = odd[:1].reshape(()), odd[1:]
        self._seed = f"blocks {key}"
        self._blocks = _odd(self._seed, 4096)

    def prefixes(self, tokens: Tokens, parent: int, depth: int = 0) -> npt.NDArray[np.uint64]:
        """[len(tokens) // block_tokens] hashes of the prefixes that end with each whole block of `tokens`.

        parent: hash of the prefix before `tokens`, of `depth` blocks; the namespace's value at depth 0. Raises
        RouterError for what is no token id.
        """
        count = len(tokens) // self.block_tokens
        hashes = np.empty(count + 1, np.uint64)
        hashes[0] = parent
        self.extend(hashes, _int32(tokens[: count * self.block_tokens]), depth)
        return hashes[1:]

    def extend(self, hashes: npt.NDArray[np.uint64], tokens: npt.NDArray[np.int32], depth: int) -> None:
        """Fill in hashes[1:], the hashes of prefixes. See `prefixes`.

        hashes[0]: of the prefix before `tokens`, of `depth` blocks. tokens: of whole blocks, contiguous.
        """
        count = len(hashes) - 1
        while len(self._blocks) < depth + count:
            self._blocks = _odd(self._seed, 2 * len(self._blocks))
        if self.block_tokens % 2:
            tokens = np.pad(tokens.reshape(count, self.block_tokens), ((0, 0), (0, 1)))
        sums = self._pairs.dot(tokens.view(_PAIR).reshape(count, len(self._pairs)).T)
        sums += self._shift
        sums ^= sums >> _FOLD
        np.multiply(sums, self._blocks[depth : depth + count], out=hashes[1:])
        np.add.accumulate(hashes, out=hashes)


class Chain:
    """Hashes of a growing prompt; tokens that are new alone are hashed."""

    def __init__(self, hasher: Fingerprinter, namespace: int) -> None:
        self._hasher = hasher
        self._buffer = np.empty(64, np.uint64)
        """The namespace, hashes of the prefixes, and room."""
        self._buffer[0] = namespace
        self._blocks = 0
        self._recent = b""
        """The last whole block and the tokens after it, int32."""
        self.tokens = 0
        """Tokens of the prompt so far."""

    @property
    def hashes(self) -> npt.NDArray[np.uint64]:
        """[tokens // block_tokens] as Fingerprinter.prefixes; valid until the prompt grows."""
        return self._buffer[1 : self._blocks + 1]

    def follow(self, prompt: Tokens) -> bool:
        """Take in the rest of `prompt`, if it continues this one; else return False.

        Only the last tokens known are compared: where one was changed before them, the hashes are those of the old one.
        """
        size, blocks = self._hasher.block_tokens, self._blocks
        start = max(0, blocks - 1) * size
        tail, length = _int32(prompt[start:]), len(prompt)
        if length < self.tokens or tail[: self.tokens - start].tobytes() != self._recent:
            return False
        end = length // size
        if end > blocks:
            if end >= len(self._buffer):
                self._buffer = np.concatenate((self._buffer[: blocks + 1], np.empty(2 * end, np.uint64)))
            new = tail[blocks * size - start : end * size - start]
            self._hasher.extend(self._buffer[blocks : end + 1], new, blocks)
            self._blocks = end
            tail = tail[(end - 1) * size - start :]
        self._recent, self.tokens = tail.tobytes(), length
        return True


def _int32(tokens: Tokens) -> npt.NDArray[np.int32]:
    """Token ids as little-endian int32, contiguous. Raises RouterError for what is no token id."""
    try:
        return np.ascontiguousarray(tokens, _TOKEN)
    except (OverflowError, ValueError, TypeError) as error:
        raise RouterError(
            f"the prompt has an entry that is not a token id ({error}): send integers in [0, 2**31)"
        ) from None


def _odd(seed: str, count: int) -> npt.NDArray[np.uint64]:
    """[count] odd numbers; more of the same seed begin with the same ones."""
    return np.random.PCG64(hash64(seed)).random_raw(count) | np.uint64(1)
