"""Continuous batching: choose the sequences of the next step, in the engine's thread.

    waiting --admit--> prefilling --chunks--> decoding --stop, length, cancel--> finished
    slots:             [0, decoding)  [decoding, decoding + prefilling)

A step admits waiting requests (as one group, of one kind), computes one chunk of the group, then the next token of
every decoding sequence, and those after it that were guessed right (`drafts`) or that its grammar forces. Memory is
reserved as sequences grow, not for what they may become.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from contracts.supports import Mask
from inference.engines.base import FinishReason, Piece
from inference.engines.drafts import Drafts
from inference.engines.guessing import LONGEST, Guesser
from inference.engines.kv import ROW, KvCache
from inference.engines.model import Batch, Rotary, forward, logits_of, make_batch
from inference.engines.prefix_cache import Prefix, PrefixStore
from inference.engines.requests import Integers, Request, SequenceTable
from inference.engines.restricted import Drawn, log_mass, restrict
from inference.engines.sampling import SEED_MASK, sample, scaled_logprobs, uniform
from inference.engines.weights import Weights
from inference.errors import EngineError
from inference.router.residency import Event

PREFILL_TOKENS = 2048
"""New tokens at which a group admits no further request; limits a step's memory and latency."""
CHUNK = 512
"""Maximum new tokens of one sequence in a step."""
STEP_TOKENS = LONGEST + 2
"""Most tokens that one step adds to a sequence: one after its prompt, then one with guesses."""
LOGIT_ROWS = 256
"""Rows of logits computed at once for scoring."""

Deliver = Callable[[Request, Any], None]
Ending = FinishReason | EngineError
"""Why a sequence is done."""
_NOTHING = np.zeros(0, np.int64)


class Scheduler:
    """Owns the cache and its sequences. Not thread-safe: only `waiting.append` may be called from other threads."""

    def __init__(
        self,
        weights: Weights,
        version: str,
        *,
        max_batch: int,
        prefix_bytes: int,
        deliver: Deliver,
        publish: Callable[[Event], None] | None = None,
        drafts: bool = True,
    ) -> None:
        """publish: gets what the prefix cache stores and drops. drafts: whether to guess tokens."""
        self.weights, self.version = weights, version
        self.waiting: deque[Request] = deque()
        self._deliver = deliver
        self._max_batch = max_batch
        self._cache = KvCache(weights.architecture)
        self._rotary = Rotary(weights.architecture)
        self._prefixes = PrefixStore(prefix_bytes, publish)
        shape = weights.architecture
        self._table = SequenceTable((shape.layers, shape.experts_per_token), shape.experts)
        self._guesser = Guesser(self._table, Drafts() if drafts else None)
        self._decoding = 0
        self._prefilling = 0
        self._chunk = CHUNK
        self.passes = 0
        """See BuiltinEngine.passes."""
        self.streamed = 0
        """Number of sequences whose tokens are delivered while they are sampled."""

    @property
    def idle(self) -> bool:
        """Whether a step would do nothing."""
        return not (self.waiting or self._decoding or self._prefilling)

    @property
    def scoring(self) -> bool:
        """Whether a `score` has begun; its result must be of one version, so a reload waits."""
        return bool(self._prefilling) and self._table.requests[self._decoding].kind == "score"

    def step(self) -> None:
        """Advance every sequence by one token, or one chunk of its prompt."""
        self._drop_cancelled()
        if self.waiting and not self._prefilling and self._decoding < self._max_batch:
            self._admit()
        self._make_room()
        if self._prefilling:
            self._prefill()
        if self._decoding:
            self._decode()

    def deliver_sampled(self) -> None:
        """Deliver what streamed sequences have sampled since their last piece."""
        for slot, request in enumerate(self._table.requests):
            if request.streams and int(self._table.length[slot]) > len(request.tokens) + request.sent:
                self._deliver(request, self._piece(slot, None))

    def reload(self, weights: Weights, version: str) -> None:
        """Use other weights from the next step on.

        Sequences in flight are prefilled again, so that later tokens and their logprobs are those of `version` alone,
        given the previous tokens. Those without a sampled token get the routing of `version`, too.
        """
        self.weights, self.version = weights, version
        self._prefixes.clear()
        in_flight = len(self._table.requests)
        self._decoding, self._prefilling = 0, in_flight
        self._table.cached[:in_flight] = 0
        self._chunk = max(ROW, PREFILL_TOKENS // max(1, in_flight))
        for slot, request in enumerate(self._table.requests):
            sampled = int(self._table.length[slot]) - len(request.tokens)
            if not sampled:
                request.marks.clear()
                self._table.routed[slot] = 0
            request.marks.append((version, sampled))

    def abort(self) -> None:
        """Finish all requests in flight and waiting with "abort"."""
        for slot in reversed(range(len(self._table.requests))):
            self._finish(slot, "abort")
        while self.waiting:
            request = self.waiting.popleft()
            if request.streams:
                self._deliver(request, request.piece(_NOTHING, _NOTHING.astype(np.float32), "abort"))
            else:
                self._deliver(request, request.completion([], [], "abort") if request.kind == "generate" else None)

    def unfinished(self) -> list[Request]:
        """Requests without a result."""
        return [*self._table.requests, *self.waiting]

    def _drop_cancelled(self) -> None:
        for slot in reversed(range(len(self._table.requests))):
            if self._table.requests[slot].cancelled:
                self._remove(slot)

    def _admit(self) -> None:
        """Start a group.

        Of requests with the same prompt (a GRPO group) the first is computed, and the others start from its state.
        """
        self._chunk = CHUNK
        kind, fresh = self.waiting[0].kind, 0
        leaders: dict[bytes, Request] = {}
        followers: list[Request] = []
        while self.waiting and fresh < PREFILL_TOKENS and len(self._table.requests) < self._max_batch:
            if self.waiting[0].kind != kind:
                break
            request = self.waiting.popleft()
            if request.cancelled:
                continue
            prompt = request.tokens.tobytes()
            if prompt in leaders and not request.followed:
                leaders[prompt].shared = request.followed = True
                followers.append(request)
                continue
            remaining = self._place(request)
            fresh += remaining
            if remaining > 1 and kind == "generate" and self._prefixes.enabled:
                leaders[prompt] = request
        self.waiting.extendleft(reversed(followers))

    def _place(self, request: Request) -> int:
        """Put `request` into the next slot, with the cached part of its prompt.

        Returns the number of tokens to compute.
        """
        count, slot = len(request.tokens), len(self._table.requests)
        generates, routing = request.kind == "generate", request.routing
        limit = count
        if generates:
            limit = min(count + request.params.max_tokens, self.weights.architecture.max_positions)
        prefix = self._prefixes.longest(request.tokens, routed=routing) if generates else None
        try:
            self._reserve(slot + 1, count, len(request.params.stop_token_ids), routing=routing)
        except MemoryError as error:
            self._deliver(request, _too_large(count, error))
            return 0
        if prefix is not None:
            self._cache.copy_in(slot, prefix.entry)
        self._table.add(request, limit, prefix, request.params.seed & SEED_MASK)
        request.marks.append((self.version, 0))
        request.learned = int(self._table.cached[slot])
        self._prefilling += 1
        self.streamed += request.streams
        return count - int(self._table.cached[slot])

    def _reserve(self, slots: int, length: int, stops: int = 0, *, routing: bool = False) -> None:
        """Make room for `slots` sequences of `length` tokens. Raises MemoryError."""
        self._cache.reserve(slots, length)
        self._table.reserve(self._cache.slots, self._cache.length, stops, routing=routing)

    def _make_room(self) -> None:
        """Make room for the tokens of a step. The longest sequences end with an error if there is no memory."""
        table = self._table
        while table.requests:
            slots = slice(0, len(table.requests))
            needed = np.minimum(table.length[slots] + STEP_TOKENS, table.limit[slots])
            slot = int(needed.argmax())
            if needed[slot] <= self._cache.length:
                return
            try:
                self._reserve(len(table.requests), int(needed[slot]))
            except MemoryError as error:
                self._deliver(table.requests[slot], _too_large(int(table.length[slot]), error))
                self._remove(slot)

    def _forward(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """Hidden states of the batch, and its routing by layer if a request of it wants that."""
        requests = self._table.requests[batch.first : batch.first + batch.rows]
        wanted, routes = any(request.routing for request in requests), list[Tensor]()
        return forward(self.weights, self._cache, self._rotary, batch, routes if wanted else None), routes

    def _record_routing(self, batch: Batch, routes: list[Tensor]) -> None:
        """Keep the routing of the batch's tokens, all but that of guesses that failed."""
        if not routes:
            return
        slots, count = batch.slots.numpy(), len(batch.slots)
        positions = batch.positions[:count].numpy()
        own = positions < self._table.cached[slots]
        chosen = torch.stack(routes, 1)[:count].numpy().astype(self._table.routes.dtype)
        self._table.record(slots[own], positions[own], chosen[own])

    def _prefill(self) -> None:
        table, first, last = self._table, self._decoding, self._decoding + self._prefilling
        starts = table.cached[first:last].copy()
        stops = np.minimum(table.length[first:last], starts + self._chunk)
        # While a group's longest prompt continues, a finished row recomputes its last token: the same bits, at the cost
        # of one row.
        starts = np.minimum(starts, stops - 1)
        parts = [
            table.tokens[first + row, start:stop] for row, (start, stop) in enumerate(zip(starts, stops, strict=True))
        ]
        batch = make_batch(first, parts, starts)
        hidden, routes = self._forward(batch)
        table.cached[first:last] = stops
        self._record_routing(batch, routes)
        if self.scoring:
            self._record_scores(batch, hidden, starts, stops)
        if (stops < table.length[first:last]).any():
            return
        self._prefilling = 0
        self._decoding = last
        if table.requests[first].kind == "score":
            for slot in reversed(range(first, last)):
                self._finish(slot, "stop")
        else:
            self._keep_shared(first, last)
            logits = logits_of(self.weights, hidden[torch.from_numpy(batch.ends - 1)])
            self._finish_ended(self._extend(first, last, logits, self._guesser.guesses(first, last, 0, 0)))

    def _keep_shared(self, first: int, last: int) -> None:
        for slot in range(first, last):
            if self._table.requests[slot].shared:
                self._keep(slot, int(self._table.length[slot]) - 1)

    def _keep(self, slot: int, length: int) -> None:
        """Keep the state of a slot's first `length` tokens for later prompts."""
        if self._prefixes.enabled:
            tokens = self._table.tokens[slot, :length].copy()
            # after a reload a sequence has the routing of other weights, too
            whole = len(self._table.requests[slot].marks) == 1
            routes = self._table.routing_of(slot, 0, length) if whole else None
            self._prefixes.put(Prefix(tokens, self._cache.copy_out(slot, length), routes))

    def _record_scores(self, batch: Batch, hidden: Tensor, starts: np.ndarray, stops: np.ndarray) -> None:
        """Store the log-probability of the token after each computed one."""
        table = self._table
        for row, (start, stop, end) in enumerate(zip(starts, stops, batch.ends, strict=True)):
            slot = batch.first + row
            following = table.tokens[slot, start + 1 : min(stop + 1, table.length[slot])]
            rows = hidden[end - (stop - start) :][: len(following)]
            for low in range(0, len(following), LOGIT_ROWS):
                part = torch.from_numpy(following[low : low + LOGIT_ROWS])
                temperatures = np.full(len(part), table.temperature[slot], np.float32)
                logprobs = scaled_logprobs(logits_of(self.weights, rows[low : low + LOGIT_ROWS]), temperatures)
                found = logprobs.gather(1, part[:, None])[:, 0].numpy()
                table.logprobs[slot, start + 1 + low : start + 1 + low + len(part)] = found

    def _decode(self) -> None:
        table, count = self._table, self._decoding
        guesses = self._guesser.guesses(0, count, self._guesser.room(count))
        starts = table.length[:count] - 1
        stops = starts + 1 if guesses is None else starts + [len(masks) for masks in guesses]
        parts = [table.tokens[slot, start:stop] for slot, (start, stop) in enumerate(zip(starts, stops, strict=True))]
        batch = make_batch(0, parts, starts)
        hidden, routes = self._forward(batch)
        ended = self._extend(0, count, logits_of(self.weights, hidden[: int(batch.ends[-1])]), guesses)
        table.cached[:count] = table.length[:count] - 1
        self._record_routing(batch, routes)
        self._finish_ended(ended)

    def _extend(
        self, first: int, last: int, logits: Tensor, guesses: list[list[Mask | None]] | None
    ) -> list[tuple[int, Ending]]:
        """Sample tokens for each of the slots [first, last). Returns the slots that are done, ascending, and why.

        logits: of each position that `guesses` has a mask for, slot by slot; of one for each slot if it is None.
        """
        table, slots = self._table, slice(first, last)
        counts = np.ones(last - first, np.int64) if guesses is None else np.array([len(each) for each in guesses])
        owners = np.repeat(np.arange(first, last), counts)
        places = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
        positions, temperatures = table.length[owners] + places, table.temperature[owners]
        requests, whole, supports = table.requests[slots], logits, None
        if guesses is not None and any(request.restriction for request in requests):
            top_ps = np.array([request.params.top_p for request in requests]).repeat(counts)
            logits, supports = restrict(logits, temperatures, [mask for each in guesses for mask in each], top_ps)
        found = sample(logits, temperatures, uniform(table.seed[owners], positions))
        tokens, logprobs = found[0].numpy(), found[1].numpy()
        if guesses is None:
            ended = self._append(first, last, tokens, logprobs)
        else:
            drawn = None if supports is None else Drawn(supports, log_mass(whole, temperatures, *found))
            ended = self._append_agreeing(first, tokens, logprobs, guesses, drawn)
        self.passes += last - first
        return ended

    def _append(
        self, first: int, last: int, sampled: Integers, logprobs: npt.NDArray[np.float32]
    ) -> list[tuple[int, Ending]]:
        """Append one token to each of the slots [first, last)."""
        table, rows, slots = self._table, np.arange(first, last), slice(first, last)
        positions = table.length[slots].copy()
        table.tokens[rows, positions], table.logprobs[rows, positions] = sampled, logprobs
        table.length[slots] += 1
        stopped = (table.stops[slots] == sampled[:, None]).any(1)
        done = stopped | (table.length[slots] >= table.limit[slots])
        return [(first + int(row), "stop" if stopped[row] else "length") for row in np.flatnonzero(done)]

    def _append_agreeing(
        self,
        first: int,
        sampled: Integers,
        logprobs: npt.NDArray[np.float32],
        guesses: list[list[Mask | None]],
        drawn: Drawn | None,
    ) -> list[tuple[int, Ending]]:
        """Append to each slot its sampled tokens up to the first that was not guessed."""
        table, row = self._table, 0
        ended: list[tuple[int, Ending]] = []
        for slot, masks in enumerate(guesses, first):
            length, tried, count = int(table.length[slot]), len(masks) - 1, 1
            own = sampled[row : row + len(masks)]
            while count <= tried and own[count - 1] == table.tokens[slot, length + count - 1]:
                count += 1
            table.tokens[slot, length : length + count] = own[:count]
            table.logprobs[slot, length : length + count] = logprobs[row : row + count]
            table.length[slot] += count
            reason: Ending | None = None
            if int(own[count - 1]) in table.requests[slot].params.stop_token_ids:
                reason = "stop"
            elif table.length[slot] >= table.limit[slot]:
                reason = "length"
            restriction = table.requests[slot].restriction
            if restriction is not None and drawn is not None:
                own_drawn = drawn.between(row, row + count)
                try:
                    restriction.take(own[:count].tolist(), tried, own_drawn, masks[:count], ended=reason is not None)
                except EngineError as error:
                    reason = error
            if reason is not None:
                ended.append((slot, reason))
            row += len(masks)
        return ended

    def _finish_ended(self, ended: list[tuple[int, Ending]]) -> None:
        """Finish these slots, which are ascending."""
        for slot, reason in reversed(ended):
            if isinstance(reason, EngineError):
                self._deliver(self._table.requests[slot], reason)
                self._remove(slot)
            else:
                self._finish(slot, reason)

    def _finish(self, slot: int, reason: FinishReason) -> None:
        """Deliver a sequence's result, keep its state for the next turn, and free its slot."""
        table, request = self._table, self._table.requests[slot]
        length, prompt = int(table.length[slot]), len(request.tokens)
        if request.kind == "generate":
            self._guesser.learn(slot)
        if request.kind == "score":
            self._deliver(request, None if reason == "abort" else [0.0, *table.logprobs[slot, 1:length].tolist()])
        elif request.streams:
            self._deliver(request, self._piece(slot, reason))
            if reason != "abort":
                self._keep(slot, int(table.cached[slot]))
        else:
            tokens, logprobs = table.tokens[slot, prompt:length].tolist(), table.logprobs[slot, prompt:length].tolist()
            if reason == "abort":
                self._deliver(request, request.completion(tokens, logprobs, reason))
            else:
                routes = table.routing_of(slot, request.params.routing_from or 0, length - 1)
                self._deliver(request, request.completion(tokens, logprobs, reason, routes))
                self._keep(slot, int(table.cached[slot]))
        self._remove(slot)

    def _piece(self, slot: int, reason: FinishReason | None) -> Piece:
        """What a streamed sequence has sampled since its last piece."""
        table, request = self._table, self._table.requests[slot]
        new = slice(len(request.tokens) + request.sent, int(table.length[slot]))
        return request.piece(table.tokens[slot, new], table.logprobs[slot, new], reason)

    def _remove(self, slot: int) -> None:
        """Free a slot and fill the gap, so that decoding and prefilling slots stay contiguous."""
        self.streamed -= self._table.requests[slot].streams
        if slot < self._decoding:
            self._decoding -= 1
            self._move(self._decoding, slot)
            slot = self._decoding
        else:
            self._prefilling -= 1
        self._move(self._decoding + self._prefilling, slot)
        self._table.requests.pop()

    def _move(self, source: int, target: int) -> None:
        if source != target:
            self._cache.move(source, target, int(self._table.cached[source]))
            self._table.move(source, target)


def _too_large(length: int, error: MemoryError) -> EngineError:
    return EngineError(f"a sequence of {length} tokens can't grow: {error}; lower max_tokens, or engine.max_batch")
