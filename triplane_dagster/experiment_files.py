"""The folder of experiment files that Dagster's processes load."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from contracts.digests import digest_of, sha256
from resources.errors import ExperimentError
from resources.experiment import Experiment, find_experiments, load_experiment

FOLDER_VARIABLE = "TRIPLANE_EXPERIMENTS"


def experiments_folder() -> Path:
    """Folder of the experiment files: $TRIPLANE_EXPERIMENTS, else experiments/ here, else the one beside the code."""
    named = os.environ.get(FOLDER_VARIABLE)
    if named:
        return Path(named)
    here = Path("experiments")
    return here if here.is_dir() else Path(__file__).resolve().parents[1] / "experiments"


def evaluations_folder() -> Path:
    """Folder of the files of named evaluations, in that of the experiments."""
    return experiments_folder() / "evaluations"


def pipelines_folder() -> Path:
    """Folder of the files of data pipelines, in that of the experiments."""
    return experiments_folder() / "data"


@dataclass(frozen=True)
class BrokenFile:
    """An experiment file that could not be loaded."""

    path: Path
    error: ExperimentError


@dataclass(frozen=True)
class Loaded:
    """The experiment files of a folder."""

    files: dict[Path, Experiment]
    """Experiments by file; their names differ."""
    broken: tuple[BrokenFile, ...]
    """Malformed files, and files with an experiment's name that others have, too."""

    @property
    def experiments(self) -> list[Experiment]:
        """The experiments that can be used."""
        return list(self.files.values())


def load_folder(folder: Path) -> Loaded:
    """Load every experiment of a folder. A file that can't be used does not affect the others.

    Of files with one name, the one that is called so is used, as by `triplane -e`: the others may be copies of it.
    Raises ExperimentError if there is no such folder.
    """
    if not folder.is_dir():
        raise ExperimentError(f"there is no folder {folder}: set ${FOLDER_VARIABLE} to the one with the experiments")
    found: dict[Path, Experiment] = {}
    broken: dict[Path, ExperimentError] = {}
    for path in find_experiments(folder):
        try:
            found[path] = load_experiment(path)
        except ExperimentError as error:
            broken[path] = error
    for path, experiment in found.items():
        same = [each for each in found if found[each].name == experiment.name]
        if len(same) > 1 and path.stem != experiment.name:
            both = " and ".join(map(str, same[:2]))
            broken[path] = ExperimentError(f"{both} are both called {experiment.name}: rename one")
    used = {path: experiment for path, experiment in found.items() if path not in broken}
    return Loaded(used, tuple(BrokenFile(path, broken[path]) for path in sorted(broken)))


def why_missing(name: str) -> str:
    """Why a run that starts now, and reads the files again, could not load this experiment; empty if it could.

    Raises ExperimentError if there is no folder.
    """
    folder = experiments_folder()
    loaded = load_folder(folder)
    if any(each.name == name for each in loaded.experiments):
        return ""
    broken = [each for each in loaded.broken if each.path.stem == name] or loaded.broken
    said = "; ".join(str(each.error) for each in broken) or f"no file in {folder} holds it"
    return f"{name} can't be loaded: {said}"


def experiments_digest(folder: Path) -> str:
    """Digest of the experiments of a folder, and of its files that can't be used."""
    loaded = load_folder(folder)
    files = [(path.name, experiment.digest) for path, experiment in loaded.files.items()]
    broken = [(each.path.name, sha256(each.path.read_bytes())) for each in loaded.broken]
    return digest_of([files, broken])
