"""Make the base policy: an imported checkpoint, or supervised training of a fresh or an imported one.

tokenizer -> artifact of each source: scripted demonstrations, accepted episodes, chats -> training on all of them
"""

from __future__ import annotations

from contracts.artifacts import Artifact, ArtifactRef, find_artifact, open_artifact
from curation.tokenizer import build_tokenizer
from ops.fork import source_inputs
from ops.mixture import Sources, sources_of
from ops.step import Step
from ops.training import warm_start
from resources.base_config import ImportedBase, SftBase
from resources.launch import Launcher


def make_base(step: Step, launcher: Launcher) -> Artifact:
    """Checkpoint of the base policy. That of a fork is what its source's training started from."""
    if step.experiment.fork is not None:
        return open_artifact(step.store, source_inputs(step.store, step.experiment.fork).started.checkpoint)
    base = step.experiment.base
    if isinstance(base, ImportedBase):
        from trainer.import_hf import import_checkpoint  # needs torch, which loading the definitions does not

        return import_checkpoint(base.directory, step.store, precision=step.experiment.trainer.precision)
    step.progress.update("tokenizer", 0, 1)
    start, tokenizer, longest = _begin(step, base)
    sources = Sources(step.store, step.experiment, base, tokenizer)
    made = {}
    for role, source in sources_of(base).items():
        total = base.demonstrations.count if source.kind == "scripted" else None
        step.progress.update(role, 0, total)
        made[role] = sources.make(source, longest, lambda rows: step.progress.update("rows of chats", rows, None)).ref
    return warm_start(step, launcher, base, tokenizer, made, start)


def _begin(step: Step, base: SftBase) -> tuple[dict[str, ArtifactRef], ArtifactRef, int | None]:
    """Checkpoint and trainer state to start from, by role (empty: a fresh model), the tokenizer, and the longest row,
    in tokens, that the trainer accepts; None: it shortens longer ones.
    """
    store, longest = step.store, base.model.max_positions
    if base.start is None:
        start, tokenizer = {}, build_tokenizer(step.experiment.demonstrated, store).ref
    else:
        from trainer.import_hf import import_checkpoint

        begin = import_checkpoint(base.start.directory, store, precision=step.experiment.trainer.precision)
        state = find_artifact(store, "trainer_state", begin.ref.key)
        assert state is not None, "it is committed before its checkpoint"
        start, tokenizer = {"checkpoint": begin.ref, "trainer_state": state.ref}, begin.manifest.parents["tokenizer"]
        longest = int(begin.json("config.json")["max_position_embeddings"])
    return start, tokenizer, longest if base.sft.truncation == "error" else None
