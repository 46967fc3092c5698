"""What the two formats give, and the one line that each wrong input ends in. No sandbox here."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from import_sources import (
    ADD,
    BUGGY,
    DOUBLE,
    FIXED,
    HIDDEN,
    PATCH,
    REPOSITORY,
    ZERO,
    clone,
    folder_task,
    planted,
    row,
    rows_file,
    write,
)

from contracts.tasks import Split
from curation.errors import TaskError
from curation.tasks.bugs import file_diff
from curation.tasks.exporting.repositories import write_repository
from curation.tasks.importing.reading import Reading
from curation.tasks.importing.splits import deal, parse_shares
from curation.tasks.importing.suite import read_source
from curation.tasks.importing.trees import commit_tree, folder_tree, patched_tree, tree_patch
from curation.tasks.inspect import task_text
from envd.errors import EnvdError


def test_a_folder_hides_its_hidden_files_its_reference_and_its_task_file(tmp_path: Path) -> None:
    folder_task(tmp_path / "adds")
    (task,) = read_source(tmp_path).tasks
    assert sorted(task.files) == [
        "src/pack/__init__.py",
        "src/pack/calc.py",
        "tests/conftest.py",
        "tests/test_double.py",
    ]
    assert sorted(task.hidden_files) == ["tests/test_double.py", "tests/unit/test_add.py"]
    assert (task.tests, task.task_id, task.meta["path"]) == ((ADD, DOUBLE), "adds", "src/pack/calc.py")


def test_an_import_names_the_toolset_of_tasks_that_name_none(tmp_path: Path, clones: tuple[Path, str]) -> None:
    about = f"instruction: x\ntests: [{ADD!r}]\nreference: fix.patch\n"
    folder_task(tmp_path / "tasks/adds", about)
    folder_task(tmp_path / "tasks/bound", f"{about}toolset: files\n")
    folder_task(tmp_path / "tasks/plain", f"{about}toolset: default\n")
    folder_task(tmp_path / "tasks/asks", "instruction: x\nfinal_state: {kind: answer, rule: number, expected: 1}\n")
    rows = rows_file(tmp_path / "rows.jsonl", [row(clones[1])])
    found = {task.task_id: task.toolset for task in read_source(tmp_path / "tasks", toolset="default+sql").tasks}
    assert found == {"adds": "default+sql", "bound": "files", "plain": "", "asks": "default+sql"}
    assert [each.toolset for each in read_source(tmp_path / "tasks").tasks] == ["", "answer", "files", ""]
    assert [each.toolset for each in read_source(rows, clones[0], "default+sql").tasks] == ["default+sql"]
    assert [each.toolset for each in read_source(rows, clones[0], "default").tasks] == [""]
    with pytest.raises(EnvdError, match="after \\+, name each of sql"):
        read_source(rows, clones[0], "default+fly")


def test_deliverables_are_read_from_both_formats_by_either_key(tmp_path: Path, clones: tuple[Path, str]) -> None:
    about = f"instruction: x\ntests: [{ADD!r}]\nreference: fix.patch\ndeliverables: [src/, '*.md']\n"
    folder_task(tmp_path / "adds", about)
    rows = rows_file(tmp_path / "rows.jsonl", [row(clones[1], artifacts=["src/", "*.md"])])
    for reading in (read_source(tmp_path), read_source(rows, clones[0])):
        assert [task.deliverables for task in reading.tasks] == [("src/", "*.md")]


@pytest.mark.parametrize(("named", "stored"), [("files", "files"), ("default", ""), ("files+sql", "files+sql")])
def test_a_task_file_names_the_toolset(named: str, stored: str, tmp_path: Path) -> None:
    about = f"instruction: x\ntests: [{ADD!r}]\nreference: fix.patch\ntoolset: {named}\n"
    folder_task(tmp_path / "adds", about)
    (task,) = read_source(tmp_path).tasks
    assert task.toolset == stored
    assert (f"--- toolset: {named}" in task_text(task)) == bool(stored)


def test_a_task_file_names_the_environment(tmp_path: Path) -> None:
    about = f"instruction: x\ntests: [{ADD!r}]\nreference: fix.patch\nenvironment: "
    folder_task(tmp_path / "adds", f"{about}{{runtime: {'a7' * 32}, ini: {{a: b}}, timeout_s: 20}}\n")
    folder_task(tmp_path / "wrong", about + "{memory_mb: 1.5}\n")
    reading = read_source(tmp_path)
    (task,) = reading.tasks
    assert task.environment.to_values() == {"runtime": "a7" * 32, "ini": {"a": "b"}, "timeout_s": 20}
    _assert_reason(reading, "wrong", "its environment is wrong at memory_mb: Input should be a valid integer")


def test_fixed_files_are_as_good_a_reference_as_a_patch(tmp_path: Path) -> None:
    about = f"instruction: repair add\ntests: [{ADD!r}]\nhidden: [tests/unit]\nreference: fixed/\nsplit: gate\n"
    folder_task(tmp_path / "adds", about, **{"fixed/src/pack/calc.py": FIXED})
    reading = read_source(tmp_path)
    (task,) = reading.tasks
    assert patched_tree(task.files, task.reference_diff, "reference")["src/pack/calc.py"] == FIXED.encode()
    assert not [path for path in task.files if path.startswith("fixed")]
    assert reading.wishes == {"adds": Split.GATE}


def test_a_row_gives_the_commit_its_tests_after_the_test_patch_and_the_lists(tmp_path: Path) -> None:
    commit = clone(tmp_path / "clones/acme__pack")
    write(tmp_path / "clones/acme__pack", {"src/pack/calc.py": "uncommitted", "junk.txt": "x"})
    (task,) = read_source(rows_file(tmp_path / "rows.jsonl", [row(commit)]), tmp_path / "clones").tasks
    assert task.files["src/pack/calc.py"] == BUGGY.encode() and "junk.txt" not in task.files
    assert "tests/unit/test_add.py" not in task.files and "tests/conftest.py" in task.files
    assert (
        task.hidden_files["tests/unit/test_add.py"] == HIDDEN.encode() and "tests/test_double.py" in task.hidden_files
    )
    assert task.tests == (ADD, ZERO, DOUBLE)
    assert task.meta["fail_to_pass"] == [ADD] and task.family == "acme/pack"


def test_a_bare_clone_is_read_like_any_other(clones: tuple[Path, str], tmp_path: Path) -> None:
    rows = rows_file(tmp_path / "rows.jsonl", [row(clones[1])])
    command = ["git", "clone", "--quiet", "--bare", str(clones[0] / "acme__pack"), str(tmp_path / "bare" / "pack.git")]
    subprocess.run(command, check=True)
    (usual,), (bare,) = (read_source(rows, repos).tasks for repos in (clones[0], tmp_path / "bare"))
    assert bare == usual


def test_no_program_that_a_clones_configuration_names_is_run(tmp_path: Path) -> None:
    commit, mark = clone(tmp_path / "clones/acme__pack"), tmp_path / "mark"
    planted(tmp_path / "clones/acme__pack", mark)
    rows = rows_file(tmp_path / "rows.jsonl", [row(commit), row("f" * 40, instance_id="absent")])
    reading = read_source(rows, tmp_path / "clones")
    assert [task.files["src/pack/calc.py"] for task in reading.tasks] == [BUGGY.encode()]
    _assert_reason(reading, "absent", r"lacks commit f{40}")
    assert not mark.exists()


ATTRIBUTES = b"*.txt text eol=crlf\n*.id ident\n*.u text working-tree-encoding=UTF-16LE\n*.py text=auto\n"
UNCHANGED = {
    ".gitattributes": ATTRIBUTES,
    "a.txt": b"one\ntwo\n",
    "b.id": b"$Id$\n",
    "c.py": b"def f():\r\n    return 1\r\n",
    "d.u": "hé\n".encode(),
}


def test_attributes_of_git_change_no_file(tmp_path: Path) -> None:
    commits = write_repository(tmp_path / "tasks.git", {"one": UNCHANGED})
    assert commit_tree(tmp_path / "tasks.git", commits["one"]) == UNCHANGED
    after = {path: data.replace(b"one", b"three").replace(b"1", b"2") for path, data in UNCHANGED.items()}
    patch = tree_patch(UNCHANGED, after)
    assert b"-    return 1\r\n+    return 2\r\n" in patch
    assert patched_tree(UNCHANGED, patch, "patch") == after


def test_links_of_a_commit_count_as_those_of_a_folder(tmp_path: Path) -> None:
    links = {"src/same": "pack/calc.py", "up": "src/same", "inner": "src", "src/around": "../inner/pack/calc.py"}
    links |= {"out": "../outside", "absolute": "/etc/hostname", "circle": "circle", "gone": "none"}
    root = tmp_path / "repo"
    write(root, REPOSITORY)
    for path, target in links.items():
        (root / path).symlink_to(target)
    (tmp_path / "outside").write_text("secret")
    found = commit_tree(root, clone(root))
    assert found == folder_tree(root)
    assert found.keys() - REPOSITORY.keys() == {".gitattributes", "src/same", "up", "src/around"}


@pytest.mark.parametrize("name", ["..", ".git"])
def test_commit_with_an_unsafe_path_is_refused(name: str, tmp_path: Path) -> None:
    clone(tmp_path / "repo")

    def git(*command: str, said: str) -> str:
        where = tmp_path / "repo"
        done = subprocess.run(["git", *command], cwd=where, check=True, capture_output=True, text=True, input=said)
        return done.stdout.strip()

    inside = git("mktree", said=f"100644 blob {git('hash-object', '-w', '--stdin', said='x')}\tconfig\n")
    tree = git("mktree", said=f"040000 tree {inside}\t{name}\n")
    who = ["-c", "user.name=t", "-c", "user.email=t@t"]
    with pytest.raises(TaskError, match=f"holds the path '{name}/config'"):
        commit_tree(tmp_path / "repo", git(*who, "commit-tree", tree, said="odd"))
    with pytest.raises(TaskError, match=f"holds the path '{name}/config'"):
        patched_tree({f"{name}/config": b"", "src/pack/calc.py": BUGGY.encode()}, PATCH.encode(), "patch")


ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "id of a folder": ({"instance_id": ".."}, r"its id '\.\.' may hold letters"),
    "unknown environment": (
        {"triplane_environment": {"os": 1}},
        r"its environment is wrong at os: .* \(known keys are runtime",
    ),
    "deadline as text": ({"triplane_environment": {"timeout_s": "20"}}, r"wrong at timeout_s\S*: .* valid integer"),
    "plugins as text": ({"triplane_environment": {"plugins": "pytest_asyncio"}}, r"wrong at plugins: .* valid tuple"),
    "endless deadline": (
        {"triplane_environment": {"timeout_s": 10**400}},
        r"wrong at timeout_s\S*: .* less than or equal",
    ),
    "more memory than servers have": (
        {"triplane_environment": {"memory_mb": 8_000_000}},
        "wrong at memory_mb: .* less than",
    ),
    "no memory": ({"triplane_environment": {"memory_mb": -5}}, r"wrong at memory_mb: .* greater than 0"),
    "runtime that is no digest": ({"triplane_environment": {"runtime": 5}}, r"wrong at runtime: .* valid string"),
    "setting that is no text": ({"triplane_environment": {"ini": {"a": 1}}}, r"wrong at ini\.a: .* valid string"),
    "missing clone": ({"repo": "acme/other"}, r"holds no clone of acme/other: clone it there as acme__other"),
    "unknown commit": ({"base_commit": "f" * 40}, r"acme__pack lacks commit f{40}: fetch it there"),
    "patch": ({"patch": "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n"}, r"its patch does not apply: .*make it anew"),
    "test patch": ({"test_patch": "nonsense"}, r"its test_patch does not apply: .*make it anew"),
    "no patch": ({"patch": " "}, r"reference fix is empty: give the patch"),
    "no tests": ({"FAIL_TO_PASS": "[]", "PASS_TO_PASS": []}, r"names no tests: list pytest node ids"),
    "nothing fails": ({"FAIL_TO_PASS": []}, r"FAIL_TO_PASS is empty: name at least one"),
    "no node id": ({"FAIL_TO_PASS": ["test_add (tests.Add)"]}, r"'test_add \(tests.Add\)' is no pytest node id: write"),
    "absent file": ({"FAIL_TO_PASS": ["tests/test_gone.py::t"]}, r"name tests/test_gone.py, which is not there"),
    "list that is no JSON": ({"FAIL_TO_PASS": "[oops"}, r"its row is wrong at FAIL_TO_PASS"),
    "list that is too deep": ({"FAIL_TO_PASS": "[" * 100_000}, r"wrong at FAIL_TO_PASS: .* nested too deeply"),
    "long repo": ({"repo": "a" * 5000}, r"its row is wrong at repo: .* at most 200 characters"),
    "missing field": ({"problem_statement": ""}, r"its row is wrong at problem_statement"),
    "deliverable": ({"deliverables": ["../x"]}, r"its artifact '../x' is no path within the workspace: write"),
    "deliverables without the fix": (
        {"deliverables": ["*.md"]},
        r"deliverables do not name src/pack/calc.py, which its reference",
    ),
    "bad id": ({"instance_id": "a b"}, r"'a b' may hold letters, digits"),
}


@pytest.fixture(scope="module")
def clones(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    root = tmp_path_factory.mktemp("clones")
    return root, clone(root / "acme__pack")


@pytest.mark.parametrize("fault", ROWS)
def test_a_row_that_is_wrong_is_named_with_its_reason(fault: str, clones: tuple[Path, str], tmp_path: Path) -> None:
    changes, reason = ROWS[fault]
    wrong = row(clones[1], **{"instance_id": "wrong-1", **changes})
    reading = read_source(rows_file(tmp_path / "rows.jsonl", [row(clones[1]), wrong]), clones[0])
    assert [task.task_id for task in reading.tasks] == ["acme__pack-1"]
    _assert_reason(reading, wrong["instance_id"], reason)


HALVES: dict[str, tuple[dict[str, Any], str]] = {
    "id": ({"instance_id": "\ud83d-x"}, r"its row is wrong at instance_id"),
    "patch": ({"patch": PATCH + "\ud83d"}, r"has \\ud83d, which is no character: remove it"),
    "setting": ({"triplane_environment": {"ini": {"a": "\ud83d"}}}, r"has \\ud83d, which is no character"),
    "test": ({"FAIL_TO_PASS": ["tests/\ud83d.py::t"]}, r"name tests/\\ud83d.py, which is not there"),
}


@pytest.mark.parametrize("place", HALVES)
def test_half_a_character_leaves_out_its_row_alone(place: str, clones: tuple[Path, str], tmp_path: Path) -> None:
    changes, reason = HALVES[place]
    wrong = row(clones[1], **{"instance_id": "wrong-1", **changes})
    reading = read_source(rows_file(tmp_path / "rows.jsonl", [row(clones[1]), wrong]), clones[0])
    assert [task.task_id for task in reading.tasks] == ["acme__pack-1"]
    _assert_reason(reading, wrong["instance_id"].replace("\ud83d", "\\ud83d"), reason)
    reading.broken[0].model_dump_json().encode()


def _assert_reason(reading: Reading, name: str, pattern: str) -> None:
    (broken,) = reading.broken
    assert broken.task_id == name and "\n" not in broken.reason
    with pytest.raises(TaskError, match=pattern):
        raise TaskError(broken.reason)


def test_an_id_given_twice_is_left_out_the_second_time(clones: tuple[Path, str], tmp_path: Path) -> None:
    reading = read_source(rows_file(tmp_path / "rows.jsonl", [row(clones[1])] * 2), clones[0])
    _assert_reason(reading, "acme__pack-1", "line 2 has the instance_id of an earlier line")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{oops", "line 2 is not JSON"),
        ("[1]", "line 2 is not an object but list"),
        ("[" * 100_000, "line 2 is not JSON"),
    ],
)
def test_a_damaged_file_is_refused_by_line(line: str, said: str, clones: tuple[Path, str], tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row(clones[1])) + f"\n{line}\n")
    with pytest.raises(TaskError, match=said):
        read_source(file, clones[0])


FOLDERS = {
    "not YAML": ({"about": "a: ["}, "its task.yaml is not YAML"),
    "aliases of aliases": (
        {"about": "a0: &0 [x]\n" + "".join(f"a{i}: &{i} [{f'*{i - 1},' * 9}]\n" for i in range(1, 9))},
        "its task.yaml is not YAML: its aliases make too many values",
    ),
    "no date": (
        {"about": "instruction: x\nfinal_state: {kind: answer, rule: exact, expected: 2023-02-30}\n"},
        "its task.yaml is not YAML: day is out of range for month",
    ),
    "unknown key": ({"about": "instruction: x\ntests: [a.py::t]\nreference: fix.patch\nhiden: []\n"}, "hiden"),
    "empty": ({"about": "\n"}, "its task.yaml is wrong at the file"),
    "no tests": (
        {"about": "instruction: x\ntests: []\nreference: fix.patch\n"},
        "names no tests: list pytest node ids",
    ),
    "no reference": (
        {"about": f"instruction: x\ntests: [{ADD!r}]\nreference: gone.patch\n"},
        "gone.patch is not there",
    ),
    "no hidden": (
        {"about": f"instruction: x\ntests: [{ADD!r}]\nhidden: [gone]\nreference: fix.patch\n"},
        "its hidden gone is not there",
    ),
    "unknown toolset": (
        {"about": f"instruction: x\ntests: [{ADD!r}]\nreference: fix.patch\ntoolset: fly\n"},
        "wrong at toolset: Value error, no toolset 'fly': use one of default, files, answer",
    ),
    "stale patch": ({"src/pack/calc.py": "pass\n"}, "its reference fix.patch does not apply"),
}


@pytest.mark.parametrize("fault", FOLDERS)
def test_a_folder_that_is_wrong_is_named_with_its_reason(fault: str, tmp_path: Path) -> None:
    changes, reason = FOLDERS[fault]
    folder_task(tmp_path / "wrong", **changes)
    _assert_reason(read_source(tmp_path), "wrong", reason)


def test_a_task_file_that_can_not_be_read_leaves_out_its_task_alone(tmp_path: Path) -> None:
    folder_task(tmp_path / "adds")
    (tmp_path / "wrong/task.yaml").mkdir(parents=True)
    reading = read_source(tmp_path)
    assert [task.task_id for task in reading.tasks] == ["adds"]
    _assert_reason(reading, "wrong", "its task.yaml can't be read: .*Is a directory")


def test_a_source_without_tasks_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"has no subfolder with a task.yaml: add one"):
        read_source(tmp_path)
    with pytest.raises(TaskError, match="nowhere does not exist: give a folder"):
        read_source(tmp_path / "nowhere")


_text = st.text("ab\n\r\x0c\x1c\u2028", max_size=20)


@settings(max_examples=25, deadline=None)
@given(before=_text, after=_text)
def test_a_cheats_patch_applies_whatever_the_lines_look_like(before: str, after: str) -> None:
    assume(before != after)
    tree = {"a.py": before.encode()}
    assert patched_tree(tree, file_diff("a.py", before, after), "cheat") == {"a.py": after.encode()}
    assume(after)
    assert patched_tree({}, file_diff("a.py", None, after), "cheat") == {"a.py": after.encode()}


_trees = st.dictionaries(st.sampled_from(["a.py", "b.bin", "c/d.txt", "c/é.md"]), st.binary(max_size=60))


@settings(max_examples=25, deadline=None)
@given(before=_trees, after=_trees)
def test_the_patch_between_two_trees_leads_from_one_to_the_other(
    before: dict[str, bytes], after: dict[str, bytes]
) -> None:
    assert patched_tree(before, tree_patch(before, after), "patch") == after


@given(
    st.sets(st.text("abc", min_size=1, max_size=5)),
    st.lists(st.sampled_from(["train=3", "gate=1", "held_out=1"]), unique=True),
)
def test_a_deal_depends_on_ids_alone_and_leaves_no_wanted_split_empty(ids: set[str], options: list[str]) -> None:
    shares = parse_shares(options)
    dealt = deal(sorted(ids), shares)
    assert dealt == deal(sorted(ids, reverse=True), shares) and dealt.keys() == ids
    wanted = {split for split, share in shares.items() if share}
    assert set(dealt.values()) <= wanted
    assert len(set(dealt.values())) == min(len(wanted), len(ids))


@pytest.mark.parametrize("option", ["train", "test=1", "train=-1", "train=x", "gate=0"])
def test_a_wrong_share_is_refused_with_an_example(option: str) -> None:
    with pytest.raises(TaskError, match=r"write e\.g\. train=0\.8"):
        parse_shares([option])
