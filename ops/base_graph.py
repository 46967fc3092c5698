"""Declarations of the step `base_policy`: a warm start on demonstrations, training on a mixture, or an import."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from contracts.artifacts import Artifact, ArtifactRef, find_artifact, open_artifact
from curation.errors import MixtureError
from curation.tasks.demonstrations import DEMONSTRATIONS_VERSION
from curation.tokenizer import TOKENIZER_VERSION, tokenizer_key
from ops.mixture import VERSIONS as SOURCE_VERSIONS
from ops.mixture import Sources, shares_of, source_slice, sources_of
from ops.spec import Refs, Slice, StepSpec
from ops.state import IterationState
from resources.base_config import ImportedBase, SftBase
from resources.errors import NotMaterialized
from resources.experiment import Experiment
from resources.refs import read_artifact, read_ref
from trainer.config import IMPORT_VERSION, SFT_VERSION
from trainer.precision import DEFAULT

_NAME = "base_policy"


def _sft(experiment: Experiment) -> SftBase:
    assert isinstance(experiment.base, SftBase), "an imported base policy is not trained here"
    return experiment.base


def _precision(experiment: Experiment) -> Slice:
    """The base policy's recipe; empty for the default, so that keys stay as they are without it."""
    chosen = experiment.trainer.precision
    return {} if chosen == DEFAULT else {"precision": chosen.model_dump(mode="json")}


def _warm_start_slice(state: IterationState) -> Slice:
    experiment, base = state.experiment, _sft(state.experiment)
    return {
        "model": base.model.model_dump(mode="json"),
        "sft": base.sft.model_dump(mode="json"),
        "seed": experiment.seed,
        "numerics": experiment.trainer.launcher.numerics,
        **_precision(experiment),
    }


def _taught_by(state: IterationState) -> Refs | None:
    """Tokenizer, sources and, as the latest base policy records it, the imported model."""
    base, start = _sft(state.experiment), dict[str, ArtifactRef]()
    if base.start is None:
        tokenizer = find_artifact(state.store, "tokenizer", tokenizer_key(state.experiment.demonstrated.seed))
        used = tokenizer.ref if tokenizer else None
    else:
        made = read_artifact(state.store, state.experiment.name, _NAME)
        parents = made.manifest.parents if made else {}
        start = {role: parents[role] for role in ("checkpoint", "trainer_state") if role in parents}
        used = parents.get("tokenizer") if start else None
    if used is None:
        return None
    sources = Sources(state.store, state.experiment, base, used)
    try:
        found = {role: sources.find(source) for role, source in sources_of(base).items()}
    except (NotMaterialized, MixtureError):
        return None
    refs = {role: each.ref for role, each in found.items() if each is not None}
    return {"tokenizer": used, **refs, **start} if len(refs) == len(found) else None


def _source_configs(experiment: Experiment) -> Slice:
    base = _sft(experiment)
    return {role: source_slice(experiment, base, source) for role, source in sources_of(base).items()}


def _source_slices(state: IterationState, made: Artifact) -> Iterator[tuple[Any, Any]]:
    for role, wanted in _source_configs(state.experiment).items():
        if role in made.manifest.parents:
            yield open_artifact(state.store, made.manifest.parents[role]).manifest.config, wanted


BASE_POLICY = StepSpec(
    name=_NAME,
    version=SFT_VERSION,
    slice=_warm_start_slice,
    kind="checkpoint",
    plane="trainer",
    needs=("launcher",),
    once=True,
    key_inputs=_taught_by,
    part_versions={"tokenizer": TOKENIZER_VERSION, "demonstrations": DEMONSTRATIONS_VERSION},
    part_configs=_source_configs,
    part_slices=_source_slices,
)


def _mixed_slice(state: IterationState) -> Slice:
    """What the trainer records of a supervised base policy that is not plain."""
    base, plain = _sft(state.experiment), _warm_start_slice(state)
    found = {name: value for name, value in plain.items() if name != "model" or base.start is None}
    found |= {"lora": base.lora.model_dump(mode="json")} if base.lora else {}
    return found | ({"mixture": shares_of(base)} if base.mixture else {})


def _placed_slice(state: IterationState) -> Slice:
    """The same with places: of the imported model, files and iterations, whose content is in the key."""
    base = _sft(state.experiment)
    places = {"start": base.start.model_dump(mode="json")} if base.start else {}
    return _mixed_slice(state) | places | {"sources": [each.model_dump(mode="json") for each in base.mixture]}


def _require_inputs(state: IterationState) -> None:
    """Raise in a dry run what the run would, for a file or an iteration that is missing."""
    base, nothing = _sft(state.experiment), ArtifactRef(kind="tokenizer", key="0" * 64, digest="0" * 64)
    for source in sources_of(base).values():
        Sources(state.store, state.experiment, base, nothing).require_inputs(source)


MIXED_BASE = replace(
    BASE_POLICY,
    slice=_placed_slice,
    config=_mixed_slice,
    part_versions={"demonstrations": DEMONSTRATIONS_VERSION, **SOURCE_VERSIONS},
    note=_require_inputs,
)


def _imported_key(state: IterationState) -> str | None:
    """Key of the latest import, which depends on the imported content."""
    ref = read_ref(state.store, state.experiment.name, _NAME)
    return ref.key if ref else None


def _import_place(experiment: Experiment) -> str:
    assert isinstance(experiment.base, ImportedBase), "a trained base policy is not imported"
    return f"import of {experiment.base.path}"


IMPORTED_BASE = replace(
    BASE_POLICY,
    version=IMPORT_VERSION,
    slice=lambda state: {**state.experiment.base.model_dump(mode="json"), **_precision(state.experiment)},
    where=_import_place,
    key_inputs=None,
    key_of=_imported_key,
    recorded_by=None,
    part_versions={},
    part_configs=None,
    part_slices=None,
)
