"""Supports of a completion that another engine sampled under a grammar: those that the same grammar gives here.

A grammar's masks depend on the tokens alone, so a matcher that follows them tells what each was drawn from. That holds
if the engine has the same masks and normalizes over them alone; a token that is not allowed, or a forced one that has
an alternative, shows that it does not.
"""

from __future__ import annotations

from dataclasses import replace

from contracts.supports import SupportsWriter
from inference.engines.base import Completion, SamplingParams
from inference.errors import EngineError
from inference.grammar.compiled import Vocabulary, compiled
from inference.grammar.matcher import Matcher, only_token

FORCED_TOLERANCE = 1e-3
"""Largest absolute log probability of a token without an alternative; 0 but for rounding."""


def with_supports(completion: Completion, params: SamplingParams, vocabulary: Vocabulary) -> Completion:
    """The completion with its supports and forced tokens. May take seconds, for a new grammar.

    Raises EngineError for a token that the grammar does not allow, for a forced one with another log probability than
    0, and for a grammar that takes too long to follow.
    """
    assert params.grammar is not None
    matcher = Matcher(compiled(params.grammar, vocabulary, params.stop_token_ids), vocabulary.size)
    writer, forced, logprobs = SupportsWriter(), list[bool](), list[float]()
    for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True):
        mask = matcher.mask()
        if mask is not None and not mask[token]:
            raise EngineError(
                f"the server sampled token {token}, which the grammar does not allow after {len(forced)} tokens: does"
                " its tokenizer differ from the checkpoint's?"
            )
        writer.add(mask)
        forced.append(only_token(mask) is not None)
        if forced[-1] and abs(logprob) > FORCED_TOLERANCE:
            raise EngineError(
                f"the server gives token {token}, to which the grammar has no alternative, the log probability"
                f" {logprob:g} instead of 0: it must report those of the masked distribution"
                " (vLLM: --logprobs-mode processed_logprobs)"
            )
        logprobs.append(0.0 if forced[-1] else logprob)
        matcher.accept(token)
        matcher.check_cost()
    return replace(completion, logprobs=logprobs, supports=writer.supports(), forced=forced if any(forced) else None)
