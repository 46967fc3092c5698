"""Fingerprints of prompts: one 64-bit hash for each prefix of whole blocks.

With pairs of tokens t, keyed odd a and c, and the namespace's hash N, modulo 2**64:

    s = a' + sum_j a_j (t_2j + 2**32 t_2j+1)    l = s ^ (s >> 32)     of a block
    p_i = N + sum_{k <= i} c_k l_k                                    of the prefix that ends with block i

Pairs need half the products, and no copy of the tokens. Blocks that differ in one token never have equal sums; those
that differ in several tokens, only at odd places and by multiples of 2**v, have with probability 2**(v - 31) at most.
Two prefixes of equal hash cost a wrong route, never a wrong token: engines compare tokens or their own hashes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np
import numpy.typing as npt

from inference.errors import RouterError

Tokens = Sequence[int] | npt.NDArray[np.integer]
_FOLD = np.uint64(32)


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
        self._shift, self._pairs = odd[0], odd[1:]
        self._seed = f"blocks {key}"
        self._blocks = _odd(self._seed, 4096)

    def prefixes(self, tokens: Tokens, parent: int, depth: int = 0) -> npt.NDArray[np.uint64]:
        """[len(tokens) // block_tokens] hashes of the prefixes that end with each whole block of `tokens`.

        parent: hash of the prefix before `tokens`, of `depth` blocks; the namespace's value at depth 0. Raises
        RouterError for what is no token id.
        """
        count = len(tokens) // self.block_tokens
        while len(self._blocks) < depth + count:
            self._blocks = _odd(self._seed, 2 * len(self._blocks))
        whole = np.ascontiguousarray(_int32(tokens[: count * self.block_tokens]))
        if self.block_tokens % 2:
            whole = np.pad(whole.reshape(count, self.block_tokens), ((0, 0), (0, 1)))
        pairs = whole.reshape(count, 2 * len(self._pairs)).view("<u8")
        blocks: npt.NDArray[np.uint64] = self._pairs @ pairs.T
        blocks += self._shift
        blocks ^= blocks >> _FOLD
        blocks *= self._blocks[depth : depth + count]
        blocks[:1] += np.uint64(parent)
        np.cumsum(blocks, out=blocks)
        return blocks


class Chain:
    """Hashes of a growing prompt; tokens that are new alone are hashed."""

    def __init__(self, hasher: Fingerprinter, namespace: int) -> None:
        self._hasher, self._parent = hasher, namespace
        """Hash of the whole blocks so far."""
        self._buffer = np.empty(64, np.uint64)
        self._blocks = 0
        self._recent = b""
        """The last whole block and the tokens after it, int32."""
        self.tokens = 0
        """Tokens of the prompt so far."""

    @property
    def hashes(self) -> npt.NDArray[np.uint64]:
        """[tokens // block_tokens] as Fingerprinter.prefixes; valid until the prompt grows."""
        return self._buffer[: self._blocks]

    def follow(self, prompt: Tokens) -> bool:
        """Take in the rest of `prompt`, if it continues this one; else return False.

        Only the last tokens known are compared: where one was changed before them, the hashes are those of the old one.
        """
        size, blocks = self._hasher.block_tokens, self._blocks
        start = max(0, blocks - 1) * size
        tail = _int32(prompt[start:])
        if len(prompt) < self.tokens or tail[: self.tokens - start].tobytes() != self._recent:
            return False
        if len(prompt) >= (blocks + 1) * size:
            made = self._hasher.prefixes(tail[blocks * size - start :], self._parent, blocks)
            end = blocks + len(made)
            if end > len(self._buffer):
                self._buffer = np.concatenate((self._buffer[:blocks], made, np.empty(end, np.uint64)))
            else:
                self._buffer[blocks:end] = made
            self._blocks, self._parent = end, made.item(len(made) - 1)
            tail = tail[(end - 1) * size - start :]
        self._recent, self.tokens = tail.tobytes(), len(prompt)
        return True


def _int32(tokens: Tokens) -> npt.NDArray[np.int32]:
    """Token ids as little-endian int32. Raises RouterError for what is no token id."""
    try:
        return np.asarray(tokens, "<i4")
    except (OverflowError, ValueError, TypeError) as error:
        raise RouterError(
            f"the prompt has an entry that is not a token id ({error}): send integers in [0, 2**31)"
        ) from None


def _odd(seed: str, count: int) -> npt.NDArray[np.uint64]:
    """[count] odd numbers; more of the same seed begin with the same ones."""
    return np.random.PCG64(hash64(seed)).random_raw(count) | np.uint64(1)
