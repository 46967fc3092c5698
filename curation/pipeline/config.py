"""Settings of a data pipeline. One YAML file each."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from contracts.environment import VARIABLE
from curation.endpoint import Endpoint

DATA_VERSION = "3"
"""Bump if a stage may give other rows for the same settings and input."""

Column = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,62}$")]
Table = Annotated[str, Field(pattern=r"^[A-Za-z_]\w{0,62}(\.[A-Za-z_]\w{0,62})?$")]
Types = dict[Column, str]
"""Types by column, in DuckDB's syntax, such as BIGINT, VARCHAR, DOUBLE[] or STRUCT(role VARCHAR, content VARCHAR)[]."""
OnError = Literal["fail", "drop"]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def ordered(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings with `columns` as pairs: a key does not depend on the order of a mapping, but the rows do."""
    columns = settings.get("columns")
    return settings | {"columns": [list(each) for each in columns.items()]} if isinstance(columns, dict) else settings


class SqliteDatabase(_Part):
    """A SQLite file. Its content is part of the key."""

    kind: Literal["sqlite"]
    """Selects this database."""
    path: str = Field(min_length=1)
    """The file; relative to the pipeline's file."""


class DuckdbDatabase(_Part):
    """A DuckDB file. Its content is part of the key."""

    kind: Literal["duckdb"]
    """Selects this database."""
    path: str = Field(min_length=1)
    """The file; relative to the pipeline's file."""


class PostgresqlDatabase(_Part):
    """A PostgreSQL database, over psycopg2 (`pip install 'triplane[postgres]'`)."""

    kind: Literal["postgresql"]
    """Selects this database."""
    url_env: str = Field(pattern=VARIABLE)
    """NAME of the environment variable that holds the URL or connection string, never the string itself."""
    revision: str = Field(min_length=1)
    """Distinguishes this content from earlier content, since a server has no digest. Change it to read again."""


Database = Annotated[SqliteDatabase | DuckdbDatabase | PostgresqlDatabase, Field(discriminator="kind")]


class ParquetSource(_Part):
    """Parquet files with equal schemas, in the order of their names."""

    kind: Literal["parquet"]
    """Selects this kind of source."""
    path: str = Field(min_length=1)
    """File, or a pattern such as `raw/*.parquet`; relative to the pipeline's file."""
    columns: tuple[Column, ...] = ()
    """Columns to read; empty: all."""


class JsonlSource(_Part):
    """JSON lines: one object per line. Missing keys are null; other keys are ignored."""

    kind: Literal["jsonl"]
    """Selects this kind of source."""
    path: str = Field(min_length=1)
    """File, or a pattern such as `raw/*.jsonl`; relative to the pipeline's file."""
    columns: Types = Field(min_length=1)
    """Types by key. A value that VARCHAR can't hold as it is, such as an object, is kept as JSON text."""
    on_error: OnError = "fail"
    """What to do with a line that is no object, or has a value of another type."""


class DatabaseSource(_Part):
    """A table of a database, read in pages of its key: `WHERE key > last ORDER BY key LIMIT n`."""

    kind: Literal["database"]
    """Selects this kind of source."""
    database: Database
    """Where the table is."""
    table: Table
    """Table or view."""
    key: Column
    """Column that is unique, not null and indexed: an integer or text."""
    columns: Types = Field(min_length=1)
    """Types by column, the key's included."""

    @model_validator(mode="after")
    def _has_key(self) -> Self:
        if self.key not in self.columns:
            raise ValueError(f"key {self.key} is not among columns: add it with its type")
        return self


Source = Annotated[ParquetSource | JsonlSource | DatabaseSource, Field(discriminator="kind")]


class _Stage(_Part):
    name: str = Field(default="", pattern=r"^[a-z0-9_-]{0,40}$")
    """Name in counts and errors; empty: the kind."""

    @property
    def selects(self) -> bool:
        """Whether the stage needs all rows before it can decide about one."""
        return False

    @property
    def called(self) -> str:
        """The name."""
        return self.name or str(getattr(self, "kind"))  # noqa: B009 - each kind declares its own

    @property
    def slice(self) -> dict[str, Any]:
        """Settings that affect the rows."""
        unused = {"name", "endpoint", "database", "connections", "cache_rows"}
        return ordered(self.model_dump(mode="json", exclude=unused))


class JoinStage(_Stage):
    """Look up each row's key in a database, in batches: `SELECT ... WHERE key IN (...)`."""

    kind: Literal["join"]
    """Selects this stage."""
    database: Database
    """Where the table is."""
    table: Table
    """Table or view."""
    by: Column
    """Column of the rows."""
    key: Column | None = None
    """Column of the table; null: called as `by`."""
    columns: Types = Field(min_length=1)
    """Columns of the table to add, with their types."""
    missing: Literal["null", "drop", "fail"] = "fail"
    """What to do with a row whose key the table lacks, or whose key is null."""
    several: Literal["fail", "first"] = "fail"
    """What to do with a key that has several rows in the table. first: the least one, in the order of `columns`."""
    connections: int = Field(default=4, ge=1, le=64)
    """Maximum number of connections."""
    cache_rows: int = Field(default=100_000, ge=0)
    """Keys whose rows are remembered, the latest ones."""


class SqlStage(_Stage):
    """Add or replace columns by DuckDB expressions over one row."""

    kind: Literal["sql"]
    """Selects this stage."""
    columns: dict[Column, str] = Field(default_factory=dict)
    """Expressions by column. All of them see the row as it was before the stage; a name that it lacks may be that of an
    earlier expression.
    """
    drop: tuple[Column, ...] = ()
    """Columns to remove."""
    on_error: OnError = "fail"
    """What to do with a row for which an expression fails."""

    @model_validator(mode="after")
    def _does_something(self) -> Self:
        if not self.columns and not self.drop:
            raise ValueError("the stage changes nothing: give columns or drop")
        return self


class WhereStage(_Stage):
    """Keep the rows for which a DuckDB predicate is true."""

    kind: Literal["where"]
    """Selects this stage."""
    predicate: str = Field(min_length=1)
    """Expression of type BOOLEAN over one row, such as `length(text) > 20`."""
    on_error: OnError = "fail"
    """What to do with a row for which the predicate fails."""


class MapStage(_Stage):
    """A Python function of the user, in worker processes."""

    kind: Literal["map"]
    """Selects this stage."""
    function: str = Field(pattern=r"^[\w.]+:\w+$")
    """module:name, found beside the pipeline's file or on Python's path. Gets a row as dict; returns a dict of new
    values, a list of such dicts (several rows), or None (the row is left out).
    """
    batch: bool = False
    """The function gets and returns an Arrow table instead."""
    columns: Types = Field(default_factory=dict)
    """Columns that the function sets, with their types."""
    input: tuple[Column, ...] = ()
    """Columns that the function gets; empty: all. Fewer are faster."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments of the function."""
    version: str = ""
    """Change it if the function computes something else. A change of the module's file, or of the file that defines the
    function, is noticed.
    """
    on_error: OnError = "fail"
    """What to do with a row for which the function raises."""


class AskStage(_Stage):
    """One request to a language model or another HTTP endpoint for each row. No request is sent twice."""

    kind: Literal["ask"]
    """Selects this stage."""
    api: Literal["chat", "json"] = "chat"
    """chat: POST to URL/chat/completions. json: POST an object of the columns in `input` to the URL."""
    column: Column
    """Column for the answer."""
    answer: Literal["text", "score"] = "text"
    """Type of the answer: a text, or a number. With api chat a number is the score of a judgement, whose schema the
    prompt gets.
    """
    model: str = ""
    """Model name at the endpoint; required with api chat. With api json it only distinguishes models at one URL."""
    revision: str = ""
    """Distinguishes this model from an earlier one of the same name; changing it sends all requests again."""
    template: str = ""
    """Prompt of api chat; {column} is replaced by the row's value."""
    input: tuple[Column, ...] = ()
    """Columns that api json sends; those that are null are left out."""
    field: str = ""
    """Key of the answer in the reply of api json."""
    reason_column: Column | None = None
    """Column for the reason of a judgement; null: not kept."""
    lowest: float = 0.0
    """Worst score on the scale in the prompt."""
    highest: float = 10.0
    """Best score on that scale."""
    temperature: float = Field(default=0.0, ge=0, le=2)
    """Sampling temperature."""
    max_tokens: int = Field(default=512, ge=1)
    """Maximum tokens of the reply."""
    max_chars: int = Field(default=60_000, ge=200)
    """Maximum characters of each column in the prompt; the middle of a longer value is left out."""
    structured: Literal["json_schema", "json_object", "none"] = "json_schema"
    """Value of OpenAI's response_format for a judgement; none for a server that lacks it."""
    extra: dict[str, JsonValue] = Field(default_factory=dict)
    """Further fields of the request. A null removes a default field."""
    on_error: Literal["fail", "drop", "null"] = "fail"
    """What to do with a row whose request is refused or whose answer is unreadable. A server that can't be reached ends
    the run.
    """
    endpoint: Endpoint
    """The server. Its URL is part of the key, and of the question, only with api json, whose requests name no model."""

    @property
    def route(self) -> str:
        """URL of api json."""
        return self.endpoint.url.rstrip("/") if self.api == "json" else ""

    @property
    def slice(self) -> dict[str, Any]:
        """See the base class."""
        return super().slice | ({"url": self.route} if self.route else {})

    @model_validator(mode="after")
    def _askable(self) -> Self:
        if self.api == "chat" and not (self.model and self.template):
            raise ValueError("api chat needs model and template")
        if self.api == "json" and not (self.input and self.field):
            raise ValueError("api json needs input, the columns to send, and field, the key of the answer")
        if self.lowest >= self.highest:
            raise ValueError(f"lowest {self.lowest} is not below highest {self.highest}: raise highest or lower lowest")
        if self.reason_column is not None and (self.api, self.answer) != ("chat", "score"):
            raise ValueError("reason_column is of a judgement: set api chat and answer score, or leave it out")
        return self


class _Selection(_Stage):
    @property
    def selects(self) -> bool:
        """See the base class."""
        return True


class Near(_Part):
    """Near-duplicates by the estimated Jaccard index of the sets of word n-grams."""

    column: Column
    """Column with the text."""
    threshold: float = Field(default=0.8, ge=0.3, le=1)
    """Least index of a duplicate. Estimated from 128 hashes: its standard error is at most 0.045."""
    ngram: int = Field(default=5, ge=1, le=50)
    """Words of an n-gram."""


class DistinctStage(_Selection):
    """Keep the first of equal, or of similar, rows."""

    kind: Literal["distinct"]
    """Selects this stage."""
    by: tuple[Column, ...] = ()
    """Columns whose values make rows equal."""
    near: Near | None = None
    """Similarity of a text, instead of `by`."""

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        if bool(self.by) == bool(self.near):
            raise ValueError("give by, the columns that make rows equal, or near, and not both")
        return self


class CapStage(_Selection):
    """Keep at most so many rows of each group."""

    kind: Literal["cap"]
    """Selects this stage."""
    by: tuple[Column, ...] = Field(min_length=1)
    """Columns whose values make a group."""
    rows: int = Field(ge=1)
    """Maximum rows of a group."""
    order: Literal["first", "random"] = "first"
    """first: in the order of the rows. random: by `seed` and the pipeline's key column."""
    seed: int = Field(default=0, ge=0)
    """Seed of order random."""


class SampleStage(_Stage):
    """Keep a share, or a number, of the rows. The choice depends on seed and key, not on the order, and is independent
    of that of earlier stages.
    """

    kind: Literal["sample"]
    """Selects this stage."""
    share: float | None = Field(default=None, gt=0, lt=1)
    """Probability of a row."""
    rows: int | None = Field(default=None, ge=1)
    """Exact number of rows; all if there are fewer."""
    by: tuple[Column, ...] = ()
    """Columns that decide; `share` keeps or drops rows with equal values together. Empty: the pipeline's key."""
    seed: int = Field(default=0, ge=0)
    """Seed."""

    @property
    def selects(self) -> bool:
        """See the base class."""
        return self.rows is not None

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        if (self.share is None) == (self.rows is None):
            raise ValueError("give share or rows, and not both")
        return self


class BalanceStage(_Selection):
    """Shape the distribution: the most rows that have these shares by the values of a column."""

    kind: Literal["balance"]
    """Selects this stage."""
    column: Column
    """Column whose values make a group."""
    shares: dict[str, Annotated[float, Field(gt=0, le=1)]] = Field(min_length=1)
    """Shares by value, which add up to 1. Rows with other values are left out."""
    seed: int = Field(default=0, ge=0)
    """Rows of a group are chosen by seed and the pipeline's key column."""

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        total = math.fsum(self.shares.values())
        if abs(total - 1) > 0.001:
            raise ValueError(f"shares add up to {total:g}: make it 1")
        return self


Stage = Annotated[
    JoinStage | SqlStage | WhereStage | MapStage | AskStage | DistinctStage | CapStage | SampleStage | BalanceStage,
    Field(discriminator="kind"),
]


class Sink(_Part):
    """Parquet files of the artifact."""

    file_mb: int = Field(default=256, ge=1, le=4096)
    """Size of a file's rows before compression, in MiB, at which the next file begins."""
    row_group_mb: int = Field(default=16, ge=1, le=512)
    """Size of a row group's rows before compression, in MiB, at which the next group begins."""


class Pipeline(_Part):
    """A source, stages in order, and a sink."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]{0,62}$")
    """Name of the file: lower case letters, digits and underscores."""
    description: str = ""
    """One line for lists."""
    key: Column
    """Column of the source that identifies a row in errors and decides samples."""
    source: Source
    """Where rows come from."""
    stages: tuple[Stage, ...] = ()
    """What happens to them, in order."""
    sink: Sink = Sink()
    """How the result is stored."""
    batch_rows: int = Field(default=4096, ge=1, le=1_000_000)
    """Rows of a batch, which a stage gets at once and which is committed as a whole."""
    workers: int = Field(default=0, ge=0, le=1024)
    """Worker processes for sql, where, map and keys of selections; 0: one per core. No part of the key."""
    memory_mb: int = Field(default=128, ge=64)
    """Memory of a selection in MiB, beyond which it uses the disk. More for `distinct near` of several million rows. No
    part of the key.
    """
