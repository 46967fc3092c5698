"""Tokenizer of the base policy: a byte-level BPE in which every name, path and operation is one token.

The policy learns to copy names last; with one token per name a copy is one attention hop. So the pre-tokenizer isolates
the given words, digits and operations with their blanks, ends a piece after every newline, and leaves the rest to BPE,
across blanks too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from itertools import chain, groupby
from random import Random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from contracts.artifacts import Artifact, ArtifactWriter, find_artifact
from contracts.chat import END_OF_TEXT, SPECIAL_TOKENS, TURN_END, chat_template, render_call
from contracts.digests import action_key
from contracts.store import Store
from contracts.tasks import Split
from curation.errors import TokenizerError
from curation.tasks.bugs import MODULES, PATHS, draw_bugs
from curation.tasks.expert import DONE, ExpertEpisode, expert_episode
from curation.tasks.names import NAMES
from curation.tasks.operations import OPERATIONS, OPERATIONS_VERSION
from curation.tasks.suite import TaskSuiteConfig

TOKENIZER_VERSION = f"2{OPERATIONS_VERSION}"
VOCABULARY = 768
_CORPUS_EPISODES = 210
_BLANKED = [f" {text} " for each in OPERATIONS for text in (each.symbol, each.word)]
"""Operators with the blanks around them."""
_WORD_WEIGHT = 4000
"""Repetitions of a word in training: more than of any pair of the corpus, so words are merged first."""


def train_tokenizer(texts: Iterable[str], words: Sequence[str], vocabulary: int) -> Tokenizer:
    """Train on `texts`.

    Each of `words` becomes one token, the same one after a blank, a bracket or a newline. An operation with its blanks
    becomes one token, too.

    Raises TokenizerError when `vocabulary` leaves no room for the words.
    """
    operations = "|".join(re.escape(each) for each in _BLANKED)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(
                Regex(f"(?<![A-Za-z0-9_])(?:{_alternatives(words)})(?![A-Za-z0-9_])|[0-9]|{operations}"), "isolated"
            ),
            pre_tokenizers.Split("\n", "merged_with_previous"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(chain(texts, (f"{piece}\n" * _WORD_WEIGHT for piece in [*words, *_BLANKED])), trainer)
    split = [word for word in words if len(tokenizer.encode(word).ids) != 1]
    if split:
        raise TokenizerError(
            f"{len(split)} of {len(words)} words are not single tokens (e.g. {split[0]}): raise the vocabulary of"
            f" {vocabulary}"
        )
    return tokenizer


def tokenizer_key(seed: int, vocabulary: int = VOCABULARY) -> str:
    """Action key of the tokenizer for suites of this seed."""
    return action_key("tokenizer", {}, {"seed": seed, "vocabulary": vocabulary}, TOKENIZER_VERSION)


def build_tokenizer(suite_config: TaskSuiteConfig, store: Store, vocabulary: int = VOCABULARY) -> Artifact:
    """Make the `tokenizer` artifact for suites of this seed; `transformers.AutoTokenizer` loads it, too."""
    config = {"seed": suite_config.seed, "vocabulary": vocabulary}
    key = tokenizer_key(suite_config.seed, vocabulary)
    found = find_artifact(store, "tokenizer", key)
    if found is not None:
        return found
    tokenizer = train_tokenizer(_corpus(suite_config.seed), [*NAMES, *PATHS, *MODULES], vocabulary)
    with ArtifactWriter(store, "tokenizer", key, parents={}, config=config, code_version=TOKENIZER_VERSION) as out:
        out.add_bytes("tokenizer.json", tokenizer.to_str(pretty=True).encode())
        out.add_bytes("tokenizer_config.json", json.dumps(_TRANSFORMERS_CONFIG, indent=1).encode())
        out.add_bytes("chat_template.jinja", chat_template().encode())
        return out.commit(meta={"vocabulary": tokenizer.get_vocab_size(with_added_tokens=True)})


_TRANSFORMERS_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": TURN_END,
    "pad_token": END_OF_TEXT,
    "model_max_length": 4096,
    "clean_up_tokenization_spaces": False,
}


def _corpus(seed: int) -> list[str]:
    """Rendered expert episodes, split at the chat markup."""
    rng = Random(f"tokenizer/{seed}")
    bugs = draw_bugs(_CORPUS_EPISODES, Split.TRAIN, seed, rng, set())
    episodes = [expert_episode(bug, bug.right, parallel=rng.random() < 0.03) for bug in bugs]
    return [piece for episode in episodes for piece in _pieces(episode)]


def _pieces(episode: ExpertEpisode) -> list[str]:
    pieces = ["user\n" + episode.instruction, "\n", "assistant\n"]
    for turn in episode.turns:
        calls = re.split("<[^<>]*>", "\n".join(render_call(call) for call in turn.calls))
        pieces += [piece for piece in (turn.note and f"{turn.note}\n", *calls) if piece]
        pieces += ["\n", "user\n", *turn.responses, "\n", "assistant\n"]
    return [*pieces, DONE]


def _alternatives(words: Sequence[str]) -> str:
    """A regular expression for any of `words`, grouped by their first two letters so that it backtracks little."""
    groups = groupby(sorted(words, key=lambda word: (word[:2], -len(word), word)), key=lambda word: word[:2])
    return "|".join(f"{re.escape(head)}(?:{'|'.join(re.escape(word[2:]) for word in group)})" for head, group in groups)
