"""How envd's C programs are compiled: hardened, static, with any C compiler, and not at all without one."""

from __future__ import annotations

import importlib.util
import os
import platform
from pathlib import Path

import pytest

from envd.native import build, guest_binary, spawner_binary
from envd.native.build import BuildError
from tests.envd.boxes import sh, spec, with_namespaces
from tests.envd.elf import (
    DF_1_NOW,
    DF_1_PIE,
    DF_BIND_NOW,
    DT_FLAGS,
    DT_FLAGS_1,
    DT_NEEDED,
    DT_TEXTREL,
    ET_DYN,
    PF_W,
    PF_X,
    PT_GNU_RELRO,
    PT_GNU_STACK,
    PT_INTERP,
    Elf,
    read_elf,
)
from tests.needs import require

ENDBR64 = b"\xf3\x0f\x1e\xfa"


def check_hardened(elf: Elf) -> None:
    kinds = dict(elf.segments)
    assert elf.kind == ET_DYN and PT_INTERP not in kinds, "static, and loaded anywhere"
    assert PT_GNU_RELRO in kinds and kinds[PT_GNU_STACK] & PF_X == 0
    assert not any(flags & PF_W and flags & PF_X for _, flags in elf.segments), "nothing is writable and executable"
    dynamic = dict(elf.dynamic)
    assert dynamic[DT_FLAGS] & DF_BIND_NOW and dynamic[DT_FLAGS_1] & (DF_1_NOW | DF_1_PIE) == DF_1_NOW | DF_1_PIE
    assert DT_NEEDED not in dynamic and DT_TEXTREL not in dynamic
    assert "__stack_chk_fail" in elf.symbols
    if platform.machine() == "x86_64":
        assert elf.symbols["main"].startswith(ENDBR64), "indirect branches are marked"


def hide_compilers(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Leave in PATH all programs but C compilers."""
    folder.mkdir()
    for directory in os.environ["PATH"].split(os.pathsep):
        for program in Path(directory).glob("*") if os.access(directory, os.R_OK | os.X_OK) else ():
            link = folder / program.name
            if not os.path.lexists(link) and not any(word in program.name for word in ("cc", "clang", "c99", "c89")):
                link.symlink_to(program)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CC", raising=False)


@pytest.mark.parametrize("program", [guest_binary, spawner_binary])
def test_the_built_programs_are_hardened(program: object) -> None:
    assert callable(program)
    check_hardened(read_elf(program()))


@pytest.mark.slow
def test_the_system_compiler_fortifies_calls(tmp_path: Path) -> None:
    require("C compiler")  # the C library of ziglang has no fortified calls
    for path in build.build(tmp_path):
        elf = read_elf(path)
        check_hardened(elf)
        assert {"__snprintf_chk", "__memcpy_chk"} <= elf.symbols.keys()


@pytest.mark.slow
def test_nothing_is_compiled_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = build.build(tmp_path)
    hide_compilers(monkeypatch, tmp_path / "bin")
    assert build.build(tmp_path) == built
    stamp = tmp_path / "envd-guest.built-from"
    stamp.write_text("other sources")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(BuildError, match=r"apt-get install gcc libc6-dev.*pip install ziglang"):
        build.build(tmp_path)
    assert stamp.read_text() == "other sources" and built[0].exists(), "a build that fails leaves what there was"


def test_a_compiler_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    with pytest.raises(BuildError, match="CC names 'no-such-compiler'"):
        build.build(tmp_path)


def test_a_source_that_does_not_compile_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for path in (*build.SOURCES.glob("*.c"), *build.SOURCES.glob("*.h")):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    with (tmp_path / "main.c").open("a") as file:
        file.write("int wrong(void) { return missing; }\n")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    with pytest.raises(BuildError, match=r"can't compile envd-guest: .*main\.c.*missing"):
        build.build(tmp_path / "bin")
    assert "missing" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(900)  # ziglang compiles its C library first
def test_without_a_compiler_ziglang_builds_programs_that_isolate(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("ziglang is not installed: `make test-slow` does it")
    with monkeypatch.context() as patch:
        hide_compilers(patch, tmp_path / "path")
        (tmp_path / "here").mkdir()
        patch.chdir(tmp_path / "here")
        built = build.build(tmp_path / "bin")
        assert list((tmp_path / "here").iterdir()) == [], "nothing is written where it runs"
        with pytest.raises(BuildError, match="ziglang has no AddressSanitizer"):
            build.build(tmp_path / "bin", sanitize=True)
    for path in built:
        check_hardened(read_elf(path))
        assert "__snprintf_chk" not in read_elf(path).symbols, "it was ziglang that compiled"
    program = tmp_path / "bin/envd-spawn"
    monkeypatch.setattr("envd.backends.namespaces.backend.spawner_binary", lambda: program)
    for directory in (tmp_path, tmp_path / "bin"):
        directory.chmod(0o755)

    async def job(backend: object) -> list[str]:
        assert hasattr(backend, "create")
        box = await backend.create(spec(run_dir))
        try:
            return [await sh(box, command) for command in ("id -u; cat calc.py", "ls /root/.. /.scratch; chroot /")]
        finally:
            await box.destroy()

    said, refused = with_namespaces(run_dir, job)
    assert said == "0\nx = 1\nexit 0" and "calc.py" not in refused and refused.endswith("exit 125")
