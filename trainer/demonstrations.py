"""Read the demonstrations of a supervised job: one artifact or a mixture, batch by batch."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from contracts.artifacts import Artifact, open_artifact
from contracts.episodes import TokenRole
from contracts.store import Store
from trainer.config import SftJob
from trainer.data import Rows, RowsReader, ScoredSequence, count_tokens
from trainer.errors import TrainingDataError
from trainer.order import Source

_COLUMNS = ["token_ids", "token_role"]
_TRAIN, _VALIDATION = "train.parquet", "validation.parquet"


def read_demonstrations(
    job: SftJob, store: Store, vocabulary: int, longest: int | None = None
) -> tuple[Rows, list[Source], list[ScoredSequence]]:
    """Demonstrations of all sources, where each source's rows are, and the clean demonstrations for validation.
    longest: context in tokens, by default that of the job's fresh model.

    Raises TrainingDataError, which names the table and the row.
    """
    main = open_artifact(store, job.demonstrations)
    longest = longest or job.model.max_positions
    shares = [(main, 1.0), *((open_artifact(store, each.demonstrations), each.weight) for each in job.mixture)]
    tokens = sum(count_tokens(artifact.path(_TRAIN)) for artifact, _ in shares)
    trained = tuple(TokenRole[role.upper()] for role in job.config.trained_roles)
    reader = _reader(job, trained, vocabulary, longest, f"{main.ref.uri}/{_TRAIN}", tokens, store)
    sources = []
    for number, (artifact, weight) in enumerate(shares):
        if number:
            reader.begin(f"{artifact.ref.uri}/{_TRAIN}")
        first = reader.rows
        for batch in artifact.batches(_TRAIN, _COLUMNS):
            reader.add(batch)
        sources.append(Source(first, reader.rows - first, weight))
        if number and not sources[-1].count:
            raise TrainingDataError(
                f"{artifact.ref.uri} has no demonstrations to train on: leave it out of the mixture"
            )
    validation = _validation(job, main, (TokenRole.POLICY,), store, vocabulary, longest)
    if not validation:  # texts without a policy
        validation = _validation(job, main, trained, store, vocabulary, longest)
    if not sources[0].count or not validation:
        raise TrainingDataError(
            f"{main.ref.uri} has {sources[0].count} demonstrations and {len(validation)} clean validation ones: both"
            " must be above 0"
        )
    return reader.finish(), sources, validation


def read_other_validation(job: SftJob, store: Store, vocabulary: int, longest: int) -> list[list[ScoredSequence]]:
    """Clean demonstrations for validation of each further source; none if the sources have no names. Raises
    TrainingDataError.
    """
    trained = tuple(TokenRole[role.upper()] for role in job.config.trained_roles)
    further = [open_artifact(store, each.demonstrations) for each in job.mixture if job.sources]
    return [_validation(job, each, trained, store, vocabulary, longest) for each in further]


def _reader(
    job: SftJob, roles: Sequence[TokenRole], vocabulary: int, longest: int, what: str, tokens: int, store: Store
) -> RowsReader:
    return RowsReader(what, vocabulary, longest, tokens, store.scratch, job.config.truncation, sorted(set(roles)))


def _validation(
    job: SftJob, main: Artifact, roles: Sequence[TokenRole], store: Store, vocabulary: int, longest: int
) -> list[ScoredSequence]:
    """The first `evaluation_episodes` clean rows for validation. roles: of the tokens that are scored. If others are
    trained, rows without any of them are left out.
    """
    count, what = job.config.evaluation_episodes, f"{main.ref.uri}/{_VALIDATION}"
    reader = _reader(job, roles, vocabulary, longest, what, count_tokens(main.path(_VALIDATION)), store)
    others = set(job.config.trained_roles) != {role.name.lower() for role in roles}
    for batch in main.batches(_VALIDATION, [*_COLUMNS, "clean"]):
        clean = pa.Table.from_batches([batch]).filter(pc.field("clean"))
        if others:
            found = [not set(roles).isdisjoint((row or ())[1:]) for row in clean.column("token_role").to_pylist()]
            clean = clean.filter(pa.array(found, pa.bool_()))
        for each in clean.combine_chunks().slice(0, count - reader.seen).to_batches():
            reader.add(each)
        if reader.seen >= count:
            break
    return list(reader.finish())
