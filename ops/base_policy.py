"""Make the base policy: a warm start on scripted demonstrations, with tokenizer and demonstrations as artifacts, or an
imported checkpoint.
"""

from __future__ import annotations

from contracts.artifacts import Artifact, open_artifact
from curation.tasks.demonstrations import build_demonstrations
from curation.tokenizer import build_tokenizer
from ops.fork import source_inputs
from ops.step import Step
from ops.training import warm_start
from resources.experiment import ImportedBase
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
    tokenizer = build_tokenizer(step.experiment.demonstrated, step.store)
    step.progress.update("demonstrations", 0, base.demonstrations.count)
    demonstrations = build_demonstrations(base.demonstrations, step.experiment.demonstrated, tokenizer, step.store)
    return warm_start(step, launcher, base, tokenizer.ref, demonstrations.ref)
