"""Strategy `revert`: functions as they were in an older version, or the changes of a commit undone at HEAD."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from pathlib import Path

from contracts.syntax import parse_python
from curation.errors import TaskError
from curation.tasks.factory.functions import Function, is_product_file, parsed
from curation.tasks.factory.source import head_of
from curation.tasks.factory.strategies import Candidate, Context, Edit, changed_text, normalized
from curation.tasks.importing.trees import Tree, objects_of, patched_tree, run_git

MOST_COMMITS = 300
"""Newest commits that are undone, one at a time; merges don't count."""
_MISSING = "has files that are not in this clone"


def candidates(context: Context) -> Iterator[Candidate]:
    """One candidate for each function that differs in the older version; without one, for each commit of the
    repository's git history that can be undone. `context.unused` gets the other functions or commits, with the reason.
    """
    if context.older is not None:
        yield from _functions(context, context.older)
    elif context.repository.clone is not None:
        yield from _commits(context, context.repository.clone)


def _functions(context: Context, older: Tree) -> Iterator[Candidate]:
    for function in context.functions:
        before = _before(function, older.get(function.source.path))
        if isinstance(before, str):
            context.unused[function.key] = before
            continue
        start, end = function.source.starts[function.first - 1], function.source.starts[function.last] - 1
        edit = Edit(function.source.path, start, end, before.text)
        yield Candidate("revert", "revert_function", function.key, (edit,))


def _before(function: Function, data: bytes | None) -> Function | str:
    """The function of the same name in an older file, or the reason why there is no candidate."""
    if data is None:
        return "its file is not in the older version"
    source = parsed(function.source.path, data)
    if isinstance(source, str):
        return f"its file in the older version: {source}"
    before = next((each for each in source.functions if each.qualname == function.qualname), None)
    if before is None:
        return "not in the older version"
    if before.is_deep:
        return "nested too deeply in the older version"
    same = normalized(before.text) == normalized(changed_text(function, ()))
    return "same code in the older version" if same else before


def _commits(context: Context, clone: Path) -> Iterator[Candidate]:
    options = ["--no-merges", "--no-show-signature", f"--max-count={MOST_COMMITS}", "--format=%H%x09%P%x09%s"]
    with objects_of(clone) as objects:
        log = run_git(["log", *options, head_of(clone)], objects).stdout.decode(errors="replace")
        for line in log.split("\n")[:-1]:
            commit, parent, subject = line.split("\t", 2)
            found = _undone(context, objects, commit, parent) if parent else "has no parent in this clone"
            if isinstance(found, str):
                context.unused[f"{commit[:12]} {subject}"] = found
            else:
                yield found


def _undone(context: Context, objects: Path, commit: str, parent: str) -> Candidate | str:
    """Candidate that undoes a commit at HEAD, or the reason why there is none. objects: of `objects_of`."""
    options = ["--no-renames", "--no-ext-diff", "--no-textconv", "--no-color"]
    names = run_git(["diff", *options, "--name-only", "-z", parent, commit], objects)
    if names.returncode:
        return _MISSING
    paths = [path for name in names.stdout.split(b"\0")[:-1] if is_product_file(path := name.decode(errors="replace"))]
    if not paths:
        return "changes no code of the product"
    if len(paths) > 1:  # a task of several files would tie their splits together
        return "changes several files of the product"
    (path,) = paths
    literal = {"GIT_LITERAL_PATHSPECS": "1"}
    patch = run_git(["diff", *options, "--full-index", commit, parent, "--", path], objects, environment=literal)
    if patch.returncode:
        return _MISSING
    before = {path: context.repository.tree[path]} if path in context.repository.tree else {}
    try:
        after = patched_tree(before, patch.stdout, "commit")
    except TaskError:
        return "does not apply to HEAD"
    if not before.keys() == after.keys() == {path}:
        return "adds or removes a file"
    try:
        if _syntax(before[path]) == _syntax(after[path]):
            return "changes no code"
    except (SyntaxError, ValueError):
        return "leaves code that this Python can't read"
    except RecursionError:
        return "leaves code that is nested too deeply"
    edits = tuple(_edits(path, before[path], after[path]))
    functions = dict.fromkeys(
        function.key for edit in edits for function in context.functions if function.encloses(edit.path, *edit.span)
    )
    if not functions:
        return "changes no function that tests run"
    meta = {"commit": commit, "functions": list(functions)}
    return Candidate("revert", "revert_commit", next(iter(functions)), edits, meta)


def _syntax(data: bytes) -> str:
    return ast.dump(parse_python(data.decode()))


def _edits(path: str, before: bytes, after: bytes) -> Iterator[Edit]:
    """Edits of whole lines that turn `before` into `after`."""
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    starts = [0]
    for line in old:
        starts.append(starts[-1] + len(line))
    for kind, first, last, begin, end in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind != "equal":
            yield Edit(path, starts[first], starts[last], b"".join(new[begin:end]).decode())
