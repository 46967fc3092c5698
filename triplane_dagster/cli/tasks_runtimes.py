"""`triplane tasks runtime` and `triplane tasks image`: what tasks of your own run in."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from contracts.artifacts import Artifact
from contracts.store import open_store
from triplane_dagster.cli.options import AsJson
from triplane_dagster.cli.output import console, print_json, print_rows

_NAME_IT = "name it in a task's environment: {runtime: %s}"


def runtime(
    source: Annotated[
        str, typer.Argument(help="A folder, a git repository (its HEAD), or pypi:NAME==VERSION.", show_default=False)
    ],
    requirement: Annotated[
        list[str] | None, typer.Option(help="A further requirement, such as `pandas<3`. Repeatable.")
    ] = None,
    index: Annotated[str | None, typer.Option(help="URL of the package index; default: pip's and uv's.")] = None,
    wheelhouse: Annotated[
        Path | None, typer.Option(help="Folder of source archives and wheels, used instead of an index.", exists=True)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a runtime: the packages that a repository and its tests need, which its tasks see instead of envd's own.

    Nothing of the repository is run. Prints the digest that tasks name (docs/tasks.md).

    Examples:

        triplane tasks runtime my-repository/

        triplane tasks runtime my-repository/ --wheelhouse wheels/ --requirement "numpy<2"
    """
    from curation.tasks.factory.source import read_repository
    from curation.tasks.runtimes import build_runtime, resolve

    store = open_store()
    tree = read_repository(source, store, index=index, wheelhouse=wheelhouse).tree
    lock = resolve(tree, index=index, wheelhouse=wheelhouse, requirements=requirement or ())
    _show(build_runtime(store, lock, index=index, wheelhouse=wheelhouse), as_json)


def image(
    archive: Annotated[
        Path, typer.Argument(help="OCI image archive (a tar, or the folder of its layout).", exists=True)
    ],
    leave_out: Annotated[
        list[str] | None,
        typer.Option(help="Path in the image to leave out, such as its copy of the repository. Repeatable."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the image, if the archive holds several.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make a runtime of a container image: a whole root file system, which tasks see instead of this machine's.

    No container engine is needed, and nothing of the image is run. The image must have bash, and Python 3.11 or newer
    with pytest. Prints the digest that tasks name (docs/tasks.md).

    Examples:

        docker save -o image.tar my/image:1 && triplane tasks image image.tar

        triplane tasks image image.tar --leave-out /testbed
    """
    from curation.tasks.runtimes import build_image

    _show(build_image(open_store(), archive, leave_out=leave_out or (), name=name), as_json)


def _show(made: Artifact, as_json: bool) -> None:
    packages = made.json("packages.json")
    if as_json:
        print_json({**made.ref.model_dump(), **made.meta, "runtime": made.meta["digest"], "packages": packages})
        return
    print_rows(packages, as_json=False, title=f"{len(packages)} Python packages")
    console().print(_NAME_IT % made.meta["digest"], soft_wrap=True)
