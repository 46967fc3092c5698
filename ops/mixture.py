"""Sources of the base policy's supervised training: the artifact of each, by role, for planning and for making it.

scripted -> demonstrations        episodes -> accepted_episodes        chats -> chats
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from contracts.artifacts import Artifact, ArtifactRef, find_artifact, open_artifact
from contracts.chat import ChatTokenizer
from contracts.digests import action_key, file_sha256
from contracts.errors import describe
from contracts.store import Store
from contracts.suites import read_suite
from curation.errors import MixtureError
from curation.mixture.accepted import ACCEPTED, ACCEPTED_VERSION, Graded, build_accepted
from curation.mixture.chats import CHATS, CHATS_VERSION, build_chats
from curation.mixture.config import ChatsSource, EpisodesSource, ScriptedSource, Source
from curation.mixture.reserved import Reserved
from curation.pipeline.versions import find_version
from curation.tasks.build import find_built
from curation.tasks.demonstrations import build_demonstrations, demonstrations_key, demonstrations_slice
from curation.tasks.suite import SUITE_VERSION, TaskSuiteConfig, generate_tasks
from ops.quarantine.members import commit_quarantined, quarantined_ref
from ops.spec import Slice, Work
from resources.base_config import SftBase
from resources.experiment import Experiment
from resources.quarantine import Quarantine
from resources.refs import require_ref
from trainer.config import source_roles

VERSIONS = {ACCEPTED: ACCEPTED_VERSION, CHATS: CHATS_VERSION}
_SCRIPTED = ScriptedSource(kind="scripted")
_TOKENIZER = "tokenizer.json"


def sources_of(base: SftBase) -> dict[str, Source]:
    """The sources by their role in the lineage, the first of which decides when training ends."""
    sources = base.mixture or (_SCRIPTED,)
    return dict(zip(source_roles([each.called for each in sources]), sources, strict=True))


def shares_of(base: SftBase) -> dict[str, float]:
    """Weights of the sources by name, relative to that of the first."""
    return {each.called: each.weight / base.mixture[0].weight for each in base.mixture}


def source_slice(experiment: Experiment, base: SftBase, source: Source) -> Slice:
    """Settings that affect the rows of a source, beyond its inputs."""
    spaced = base.spaced if base.start is not None else None
    if isinstance(source, ScriptedSource):
        return demonstrations_slice(base.demonstrations, experiment.demonstrated.seed, spaced)
    suite = {"tasks": experiment.tasks.made_from, "suite_version": SUITE_VERSION}
    return {**source.slice, **suite, **({"spaced": base.spaced} if isinstance(source, ChatsSource) else {})}


class Sources:
    """The sources of an experiment's base policy for one tokenizer."""

    def __init__(self, store: Store, experiment: Experiment, base: SftBase, tokenizer: ArtifactRef) -> None:
        self._store, self._experiment, self._base, self._tokenizer = store, experiment, base, tokenizer

    def require_inputs(self, source: Source) -> None:
        """Raise NotMaterialized or MixtureError if what a source reads is missing."""
        if not isinstance(source, ScriptedSource):
            self._work(source)

    def find(self, source: Source) -> Artifact | None:
        """The artifact of a source, or None. Raises NotMaterialized or MixtureError if its input is missing."""
        if isinstance(source, ScriptedSource):
            config = source_slice(self._experiment, self._base, source)
            key = demonstrations_key(
                self._base.demonstrations, self._experiment.demonstrated.seed, self._tokenizer, config.get("spaced")
            )
            return find_artifact(self._store, "demonstrations", key)
        return self._work(source).find()

    def make(self, source: Source, longest: int | None, progress: Callable[[int], None]) -> Artifact:
        """The artifact of a source, made if it does not exist. longest: see `build_chats`. Raises what `find` does, and
        MixtureError for a row that can't be trained on.
        """
        base, tokenizer = self._base, open_artifact(self._store, self._tokenizer)
        if isinstance(source, ScriptedSource):
            spaced = source_slice(self._experiment, base, source).get("spaced")
            return build_demonstrations(
                base.demonstrations, self._experiment.demonstrated, tokenizer, self._store, spaced
            )
        work = self._work(source)
        found = work.find()
        if found is not None:
            return found
        chat = ChatTokenizer.from_directory(tokenizer.directory(), spaced=base.spaced)
        with work.writer() as out:
            if isinstance(source, EpisodesSource):
                graded = list(self._graded(source, work))
                for each in graded:
                    commit_quarantined(self._store, each.quarantined)
                facts = build_accepted(graded, source, chat, self._reserved(), out)
            else:
                data = self._data(source)
                digest = data.ref.digest if data else _digest(source)
                files = [data.path(name) for name in data.names()] if data else []
                facts = build_chats(source, digest, chat, self._reserved(), out, longest, progress, files)
            if self._work(source).key != work.key:
                raise MixtureError(
                    f"source {source.called} of base.mixture changed while it was read: run the step again"
                )
            return out.commit(meta=facts)

    def _work(self, source: EpisodesSource | ChatsSource) -> Work:
        config = source_slice(self._experiment, self._base, source)
        parents = {"tokenizer": self._tokenizer}
        kind, inputs = ACCEPTED, dict[str, str]()
        if isinstance(source, ChatsSource):
            kind, data = CHATS, self._data(source)
            inputs = {} if data else {"file": _digest(source)}
            parents |= {"data": data.ref} if data else {}
        else:
            for iteration in source.iterations:
                parents |= self._graded_refs(source, iteration)
        keyed = {**{role: ref.digest for role, ref in parents.items()}, **inputs}
        key = action_key(kind, keyed, config, VERSIONS[kind])
        return Work(self._store, kind, key, parents, config, VERSIONS[kind])

    def _data(self, source: ChatsSource) -> Artifact | None:
        """Result of the data pipeline that a source names; None: it names a file. Raises PipelineError."""
        return find_version(self._store, source.data).artifact if source.data else None

    def _graded_refs(self, source: EpisodesSource, iteration: str) -> dict[str, ArtifactRef]:
        """Rollouts and rewards of an iteration, and the quarantined episodes among them if there are any."""
        given = {name: require_ref(self._store, source.experiment, name, iteration) for name in ("rollouts", "rewards")}
        marked = quarantined_ref(Quarantine(self._store).episodes(**given))
        return {f"{role} {iteration}": ref for role, ref in {**given, **marked}.items()}

    def _graded(self, source: EpisodesSource, work: Work) -> Iterator[Graded]:
        """The episodes of each iteration. Raises MixtureError if a policy of another tokenizer sampled them."""
        own = _tokenizer_digest(open_artifact(self._store, self._tokenizer))
        for iteration in sorted(source.iterations):  # the key is the same in every order
            place = f"{source.experiment}/{iteration}"
            rollouts, rewards = (
                open_artifact(self._store, work.parents[f"{name} {iteration}"]) for name in ("rollouts", "rewards")
            )
            if _tokenizer_digest(open_artifact(self._store, rollouts.manifest.parents["policy"])) != own:
                raise MixtureError(
                    f"the policy that sampled {place} has another tokenizer than this base policy, whose tokens would"
                    " mean something else: leave the source out, or write its episodes as chats into a file"
                )
            if rewards.manifest.parents["rollouts"] != rollouts.ref:
                raise MixtureError(f"the rewards of {place} are of other rollouts: materialize its rewards again")
            yield Graded(place, rollouts, rewards, list(Quarantine(self._store).episodes(rollouts.ref, rewards.ref)))

    def _reserved(self) -> Reserved:
        config = self._experiment.tasks
        if isinstance(config, TaskSuiteConfig):
            return Reserved.of(generate_tasks(config))
        suite = find_built(config, self._store)
        assert suite is not None, "an imported suite is found or missing"
        return Reserved.of(read_suite(suite))


def mixture_numbers(store: Store, checkpoint: Artifact) -> dict[str, Any]:
    """Rows and epochs that each source was trained for, and the rows that it left out, for display."""
    found: dict[str, Any] = {}
    parents = checkpoint.manifest.parents
    for name, trained in checkpoint.meta.get("sources", {}).items():
        found |= {f"{name}: rows trained": trained["drawn"], f"{name}: epochs": trained["epochs"]}
        source = parents.get(f"mixture {name}", parents["demonstrations"])
        left_out = open_artifact(store, source).meta.get("left_out", {})
        found |= {f"{name}: left out, {reason}": count for reason, count in left_out.items() if count}
    return found


def _digest(source: ChatsSource) -> str:
    try:
        return file_sha256(source.file)
    except OSError as error:
        raise MixtureError(
            f"base.mixture: {source.path} can't be read ({describe(error)}): name a file on the machine that"
            " makes the base policy"
        ) from None


def _tokenizer_digest(artifact: Artifact) -> str:
    return next(each.sha256 for each in artifact.manifest.files if each.path == _TOKENIZER)
