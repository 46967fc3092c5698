"""Find a policy by the names that users give it: in the store, in a Hugging Face folder, or at a server.

digest | live | base | NAME/live | NAME/base | NAME/0003    a checkpoint of the store
folder with config.json                                     imported as a base policy is
http://host:8000/v1                                         an `outside_policy`, see inference.engines.outside
"""

from __future__ import annotations

from pathlib import Path

from contracts.artifacts import Artifact, ArtifactRef, ArtifactWriter, list_artifacts, open_artifact
from contracts.chat import ChatTokenizer, ToolCallText
from contracts.digests import action_key
from contracts.errors import ConfigError
from contracts.store import Store
from inference.engines.config import OUTSIDE_POLICY, OpenAIConfig
from ops.inputs import find_checkpoint
from ops.iteration_keys import iteration_number
from resources.errors import RegistryError
from resources.loops import run_async
from resources.refs import experiments_in, require_ref
from resources.registry import Registry

OUTSIDE_VERSION = "1"
LATEST = ("live", "base")
"""Names of policies of an experiment that are no iterations."""
_SAMPLE = "def gr\u00f6\u00dfe(values: list[int]) -> int:\n    return sum(values) // 12345  # <tests/test_a.py>\n"
"""Text by whose tokens another tokenizer is found out."""
_CALL = ToolCallText("edit", {"path": "a.py"})


def stored_policy(store: Store, experiment: str, name: str) -> ArtifactRef:
    """The checkpoint that `name` says; live and base are those of `experiment`.

    Raises RegistryError or NotMaterialized.
    """
    of, slash, which = name.rpartition("/")
    if slash and of not in experiments_in(store):
        known = ", ".join(experiments_in(store)) or "(none)"
        raise RegistryError(f"policy {name!r}: {store.url} has no experiment {of!r}; choose one of {known}")
    if slash and iteration_number(which) is not None:
        return require_ref(store, of, "checkpoint", which)
    if which not in LATEST:
        if slash:
            raise RegistryError(f"policy {name!r}: write {of}/live, {of}/base or an iteration such as {of}/0003")
        return find_checkpoint(store, which)
    live = Registry(store, of or experiment).live() if which == "live" else None
    return live.policy if live else require_ref(store, of or experiment, "base_policy")


def is_url(name: str) -> bool:
    """Whether a policy is named by the URL of its server."""
    return name.startswith(("http://", "https://"))


def is_folder(name: str) -> bool:
    """Whether a policy is named by a folder. A name of the store's never begins as a path does."""
    return name.startswith((".", "/", "~")) or (Path(name) / "config.json").is_file()


def is_imported(policy: Artifact) -> bool:
    """Whether a policy descends from weights that were not trained here, so that nobody knows what they were trained
    on.
    """
    while (start := policy.manifest.parents.get("checkpoint")) is not None:
        policy = open_artifact(policy.store, start)
    return policy.ref.kind == OUTSIDE_POLICY or "imported" in policy.meta


def outside_policy(store: Store, server: OpenAIConfig, model: str | None, tokenizer: Path | None) -> Artifact:
    """The policy that a server samples with: a checkpoint, if the store has it, else its `outside_policy`.

    model: name at the server; None: its first one. tokenizer: folder with that of the policy. Raises ConfigError for
    an unknown model or another tokenizer, EngineUnreachable.
    """
    return run_async(_outside_policy(store, server, model, tokenizer))


async def _outside_policy(store: Store, server: OpenAIConfig, model: str | None, tokenizer: Path | None) -> Artifact:
    from inference.engines.outside import connected  # httpx takes a while

    async with connected(server, model or server.model) as engine:
        version, ours = await engine.version(), await engine.is_ours()
        stored = [each for each in list_artifacts(store, "checkpoint") if each.ref.digest == version]
        if stored:
            return stored[0]
        if model is not None and version != model and not ours:
            raise ConfigError(f"{server.base_url} has no model {model!r}, its first one is {version!r}: name that one")
        if tokenizer is None:
            raise ConfigError(
                f"{server.base_url} serves {version[:24]!r}, which is not in {store.url}: name the folder of its"
                " tokenizer with --tokenizer, since prompts are sent as token ids"
            )
    from trainer.import_hf import publish_tokenizer  # needs torch

    own = publish_tokenizer(tokenizer, store)
    named = model or (server.model if ours else version)
    async with connected(server, named) as engine:
        chat = ChatTokenizer.from_directory(own.directory())
        ids = chat.encode_text(_SAMPLE)
        if not ours:  # which reads no markup in a text
            ids = chat.prompt([("user", _SAMPLE)]) + chat.policy_turn([_CALL]) + chat.environment_turn(["ok"])
        there = await engine.tokens_of(chat.decode(ids))
    if there != (ids if isinstance(there, list) else len(ids)):
        raise ConfigError(
            f"the tokenizer in {tokenizer} is not that of {version[:24]!r} at {server.base_url}: they make other"
            " tokens of the same text; name the folder of the model that is served"
        )
    policy = {"model": named, "version": version, "pinned": ours}
    key = action_key(OUTSIDE_POLICY, {"tokenizer": own.ref.digest}, policy, OUTSIDE_VERSION)
    with ArtifactWriter(
        store, OUTSIDE_POLICY, key, parents={"tokenizer": own.ref}, config=policy, code_version=OUTSIDE_VERSION
    ) as out:
        for name in own.names():
            out.add_bytes(name, own.path(name).read_bytes())
        out.add_json("policy.json", policy)
        return out.commit(meta=policy)
