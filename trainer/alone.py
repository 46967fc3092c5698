"""The trainer alone: a YAML file that names Parquet files of episodes, and an output folder.

    FILE --read_file--> settings --prepare--> job on artifacts in OUTPUT/store --run_job--> OUTPUT/checkpoint

The job's key is the digest of everything that decides its result, so the same file continues a killed run and finds a
finished one.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from contracts.artifacts import ArtifactRef, find_artifact, open_artifact
from contracts.digests import digest_of
from contracts.errors import describe
from contracts.owned import remove
from contracts.store import Store, open_store
from contracts.yaml_text import load_yaml
from trainer.config import RL_VERSION, SFT_VERSION, Device, MixtureSource, RlConfig, RlJob, SftConfig, SftJob
from trainer.errors import TrainingConfigError, TrainingError
from trainer.model_config import ModelConfig
from trainer.precision import DEFAULT, Precision
from trainer.settings import Settings
from trainer.watchers import WatchConfig, WatchedRun

RESULT, METRICS = "result.json", "metrics.jsonl"


class Data(Settings):
    """One source of a mixture."""

    path: Path
    """Parquet file of episodes."""
    weight: float = Field(default=1.0, gt=0)
    """Share of the rows drawn, relative to the other sources."""


class _TrainFile(Settings):
    output: Path
    """Folder for the checkpoint, the metrics and the job's store. Relative paths are those of the config file."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of initialization and data order."""
    device: Device = "cpu"
    """Where to train. cuda: each rank on an NVIDIA GPU of its own."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of each rank. The count changes the resulting bits."""
    ranks: int = Field(default=1, ge=1, le=1024)
    """Processes that share every batch. The count changes the resulting bits."""
    watch: WatchConfig = WatchConfig()
    """Where metrics go, beside `metrics.jsonl`."""


class SftFile(_TrainFile):
    """Supervised training of a fresh model."""

    kind: Literal["sft"] = "sft"
    data: list[Data] = Field(min_length=1)
    """Demonstrations; several are mixed by weights."""
    validation: Path | None = None
    """Parquet file of demonstrations for validation; None: up to 64 rows of the first source are held out."""
    tokenizer: Path
    """Folder with tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    model: ModelConfig = ModelConfig()
    """Shape of the model."""
    config: SftConfig = SftConfig(expected_solve=1.0)
    """Recipe. Without an `expected_solve` training takes `max_steps` steps."""
    precision: Precision = DEFAULT
    """Recipe by which the policy trains and is served; see docs/precision.md."""


class RlFile(_TrainFile):
    """One iteration of policy-gradient training."""

    kind: Literal["rl"] = "rl"
    data: Path
    """Graded episodes."""
    start: Path
    """Output folder of an earlier run, which this one continues with its optimizer, or a folder of an unquantized
    Hugging Face checkpoint.
    """
    config: RlConfig = RlConfig()
    """Recipe."""


_FILE: TypeAdapter[SftFile | RlFile] = TypeAdapter(Annotated[SftFile | RlFile, Field(discriminator="kind")])


@dataclass(frozen=True)
class Plan:
    """A job and its output folder."""

    job: SftJob | RlJob
    output: Path
    watch: WatchConfig

    @property
    def watched(self) -> WatchedRun:
        """Where its metrics go."""
        return WatchedRun(watch=self.watch, output=self.output, name=self.output.name)

    def finish(self, result: dict[str, Any]) -> None:
        """Replace the output's checkpoint and metrics by the job's, and write `result.json`.

        After a kill there is no `result.json`, and the next call completes the output.
        """
        store = open_store(self.job.store)
        checkpoint = open_artifact(store, ArtifactRef(**result["checkpoint"]))
        folder, fresh, earlier = (self.output / name for name in ("checkpoint", ".checkpoint.part", ".checkpoint.old"))
        remove(fresh)
        for name in checkpoint.names():
            target = fresh / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(checkpoint.path(name), target)
        (self.output / RESULT).unlink(missing_ok=True)
        (fresh / METRICS).replace(self.output / METRICS)
        remove(earlier)
        if folder.exists():
            folder.rename(earlier)
        fresh.rename(folder)
        remove(earlier)
        part = self.output / f".{RESULT}.part"
        part.write_text(json.dumps(result, indent=1))
        part.replace(self.output / RESULT)


def read_file(path: Path) -> SftFile | RlFile:
    """Settings of a file. Raises TrainingConfigError with field, value and fix."""
    try:
        values = load_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TrainingConfigError(f"{path} can't be read ({error.strerror}): pass a YAML file") from None
    except ValueError as error:
        raise TrainingConfigError(f"{path} is not YAML ({error}): correct it") from None
    if isinstance(values, dict) and values.get("kind") == "sft":
        values = _usual(values)
    try:
        return _FILE.validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "file"
        raise TrainingConfigError(f"{path} field {where}: {first['msg']} (got {first.get('input')!r:.80})") from None


def _usual(values: dict[str, Any]) -> dict[str, Any]:
    """Values of a supervised run: one path is one source, and no criterion ends it unless it is named."""
    data, config = values.get("data"), values.get("config")
    found = {**values, "data": [{"path": data}] if isinstance(data, str) else data}
    if isinstance(config, dict):
        found["config"] = {"expected_solve": 1.0, **config}
    return found


def prepare(path: Path) -> Plan:
    """The job of a file, with its data in the store. Raises TriplaneError."""
    config, base = read_file(path), path.absolute().parent
    output = base / config.output
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrainingError(f"output {output} can't be made: {describe(error)}") from None
    store = open_store(str(output / "store"))
    job = _sft_job(config, base, store) if isinstance(config, SftFile) else _rl_job(config, base, store)
    version = SFT_VERSION if isinstance(job, SftJob) else RL_VERSION
    what = job.model_dump(mode="json", exclude={"store", "key", "rank_timeout_s"})
    return Plan(job.model_copy(update={"key": digest_of([version, what])}), output, config.watch)


def _shared(config: _TrainFile, store: Store) -> dict[str, Any]:
    """Fields of every job; `prepare` replaces the key."""
    fields = config.model_dump(include={"seed", "device", "threads", "ranks"})
    return {"store": store.url, "key": "0" * 64, **fields}


def _sft_job(config: SftFile, base: Path, store: Store) -> SftJob:
    from trainer.episode_files import import_demonstrations
    from trainer.import_hf import publish_tokenizer  # needs torch, which reading the file does not

    validation = base / config.validation if config.validation else None
    first, *others = config.data
    mixture = tuple(
        MixtureSource(
            demonstrations=import_demonstrations(base / each.path, store).ref, weight=each.weight / first.weight
        )
        for each in others
    )
    return SftJob(
        **_shared(config, store),
        tokenizer=publish_tokenizer(base / config.tokenizer, store).ref,
        demonstrations=import_demonstrations(base / first.path, store, validation, hold_out=validation is None).ref,
        mixture=mixture,
        model=config.model,
        config=config.config,
        precision=config.precision,
    )


def _rl_job(config: RlFile, base: Path, store: Store) -> RlJob:
    from trainer.episode_files import import_episodes

    checkpoint, state = _start(base / config.start, store, config.config.precision)
    return RlJob(
        **_shared(config, store),
        dataset=import_episodes(base / config.data, store).ref,
        checkpoint=checkpoint,
        trainer_state=state,
        config=config.config,
    )


def _start(folder: Path, store: Store, precision: Precision) -> tuple[ArtifactRef, ArtifactRef]:
    """Checkpoint and trainer state that a run starts from, in `store`."""
    if not (folder / RESULT).is_file():
        from trainer.import_hf import import_checkpoint

        checkpoint = import_checkpoint(folder, store, precision=precision)
        state = find_artifact(store, "trainer_state", checkpoint.ref.key)
        assert state is not None, "it is committed before its checkpoint"
        return checkpoint.ref, state.ref
    try:
        result = json.loads((folder / RESULT).read_text())
        refs = [ArtifactRef(**result[name]) for name in ("checkpoint", "trainer_state")]
    except (ValueError, KeyError, TypeError) as error:
        raise TrainingError(f"{folder / RESULT} is damaged ({error}): run its config file again") from None
    earlier = open_store(str(folder / "store"))
    for ref in refs:
        open_artifact(earlier, ref).directory()  # checks every file
        manifest = f"{ref.uri}/manifest.json"
        for key in [key for key in earlier.list(f"{ref.uri}/") if key != manifest] + [manifest]:
            store.create_file(key, earlier.local_path(key))
    return refs[0], refs[1]
