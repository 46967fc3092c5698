import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from contracts.artifacts import Artifact
from contracts.chat import ChatTokenizer, ToolCallText
from contracts.store import open_store
from curation.errors import TokenizerError
from curation.tasks.bugs import MODULES, PATHS
from curation.tasks.names import NAMES
from curation.tasks.operations import OPERATIONS
from curation.tasks.suite import TaskSuiteConfig
from curation.tokenizer import VOCABULARY, build_tokenizer, train_tokenizer

PLACES = [
    "{}",
    " {}",
    "({}, 1)",
    "def {}(a):",
    "\n{}\n",
    "    return {} + 1",
    '"new":"{}"',
    "of {} and",
    "{}:",
    "-{}",
    "fix {}: it",
    "from {} import",
]


@pytest.mark.parametrize("place", PLACES)
def test_a_name_or_path_is_the_same_single_token_wherever_it_stands(tokenizer: ChatTokenizer, place: str) -> None:
    for word in [*NAMES, *PATHS, *MODULES]:
        (alone,) = tokenizer.encode_text(word)
        assert tokenizer.encode_text(place.format(word)).count(alone) == 1


@pytest.mark.parametrize("word", [each.word for each in OPERATIONS])
def test_the_word_of_an_operation_is_the_same_single_token_between_names_and_in_a_note(
    tokenizer: ChatTokenizer, word: str
) -> None:
    (alone,) = tokenizer.encode_text(f" {word} ")
    for text in (f"bala returns kaki {word} badu", f"want {word} have - here"):
        assert tokenizer.encode_text(text).count(alone) == 1


@pytest.mark.parametrize("symbol", [each.symbol for each in OPERATIONS])
def test_an_operator_is_the_same_single_token_after_a_name_and_after_a_call(
    tokenizer: ChatTokenizer, symbol: str
) -> None:
    (alone,) = tokenizer.encode_text(f" {symbol} ")
    for text in (f"    return kaki {symbol} badu", f'"new":"    return bala(kaki, badu) {symbol} zila"'):
        assert tokenizer.encode_text(text).count(alone) == 1


def test_the_vocabulary_has_the_size_that_was_asked_for(tokenizer: ChatTokenizer) -> None:
    assert tokenizer.vocabulary_size == VOCABULARY


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text_comes_back_from_its_tokens(tokenizer: ChatTokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode_text(text)) == text


def test_transformers_renders_the_same_tokens(tokenizer: ChatTokenizer, tokenizer_directory: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tokenizer_directory)
    reads = [ToolCallText("read", {"path": "app.py"}), ToolCallText("read", {"path": "tests/test_visible.py"})]
    edit = ToolCallText("edit", {"path": "app.py", "line": 2, "new": "    return max(kaki, badu)"})
    answers = [f"1 def bala({NAMES[3]}, {NAMES[9]}):\n2     return {NAMES[3]} - {NAMES[9]}", "1 import sys\n2 "]
    messages = [
        {"role": "user", "content": "fix app.py: bala returns the larger of kaki and badu"},
        {"role": "assistant", "content": "", "tool_calls": [_call(call) for call in reads]},
        *({"role": "tool", "content": answer} for answer in answers),
        {"role": "assistant", "content": "", "tool_calls": [_call(edit)]},
        {"role": "tool", "content": "ok"},
    ]
    ours = (
        tokenizer.prompt([("user", messages[0]["content"])])
        + tokenizer.policy_turn(reads)
        + tokenizer.environment_turn(answers)
        + tokenizer.policy_turn([edit])
        + tokenizer.environment_turn(["ok"])
    )
    assert list(theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)) == ours
    assert theirs.eos_token_id == tokenizer.end_of_turn
    assert theirs.pad_token_id == tokenizer.pad


def _call(call: ToolCallText) -> dict[str, object]:
    return {"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}


def test_a_vocabulary_without_room_for_the_words_is_refused() -> None:
    with pytest.raises(TokenizerError, match="raise the vocabulary of 300"):
        train_tokenizer(["some text"], NAMES, 300)


@pytest.mark.slow
@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_another_process_trains_the_same_tokenizer(
    tokenizer_artifact: Artifact, tmp_path: Path, hash_seed: str
) -> None:
    code = (
        "import sys; from contracts.store import open_store; from curation.tasks.suite import TaskSuiteConfig\n"
        "from curation.tokenizer import build_tokenizer\n"
        "print(build_tokenizer(TaskSuiteConfig(), open_store(sys.argv[1])).ref.digest)"
    )
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "RAYON_NUM_THREADS": hash_seed}
    command = [sys.executable, "-c", code, str(tmp_path)]
    told = subprocess.run(
        command, capture_output=True, text=True, check=True, env=environment, cwd=Path(__file__).parents[2]
    )
    assert told.stdout.strip() == tokenizer_artifact.ref.digest


def test_another_suite_seed_still_fills_the_vocabulary(tmp_path: Path) -> None:
    artifact = build_tokenizer(TaskSuiteConfig(seed=7), open_store(str(tmp_path)))
    assert Tokenizer.from_file(str(artifact.path("tokenizer.json"))).get_vocab_size() == VOCABULARY
