"""`w5xde deploy`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.processes import run_python
from w5xde.cli.main import main
from w5xde.deploy.engines import ENGINES

K8S = ["deploy", "k8s", "train.py", "--image", "registry.example/w5xde:1"]
SYSTEMD = ["deploy", "systemd", "train.py", "--advertise", "pool.lan"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # Readable for others, as a folder for a unit's user has to be.
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("job = 1\n")
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The error of a command that must be refused as the user's mistake."""
    assert main(list(words)) in (2, 20, 40)
    found = capsys.readouterr()
    assert found.out == ""
    assert "fix: " in found.err
    return found.err


def test_help_has_an_example_for_every_engine(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["deploy"], *(["deploy", name] for name in ENGINES)):
        with pytest.raises(SystemExit) as ended:
            main([*words, "--help"])
        assert ended.value.code == 0
        shown = " ".join(capsys.readouterr().out.split())
        for name in words[1:] or ENGINES:
            assert f"w5xde deploy {name} train.py" in shown


def test_one_file_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(K8S) == 0
    found = capsys.readouterr()
    assert found.out.startswith("# Run train of train.py")
    assert found.out.count("kind: Job\n") == 2
    assert "=====" not in found.out
    assert found.err == ""


def test_several_files_are_set_apart_by_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(SYSTEMD) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("# ===== w5xde-train.service =====\n")
    assert "\n# ===== w5xde-train-node.service =====\n" in shown


def test_files_are_written_into_a_folder_and_never_replace_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*K8S, "--out", "made"]) == 0
    found = capsys.readouterr()
    assert found.out == ""
    assert sorted(each.name for each in Path("made").iterdir()) == ["Containerfile", "w5xde-train.yaml"]
    # The same again is no change.
    assert main([*K8S, "--out", "made"]) == 0
    capsys.readouterr()
    edited = Path("made/w5xde-train.yaml")
    edited.write_text("mine")
    assert "error[W5-635]" in refused(capsys, *K8S, "--out", "made")
    assert edited.read_text() == "mine"


def test_a_folder_that_cannot_be_written_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert "error[W5-635]" in refused(capsys, *K8S, "--out", "train.py")


def test_a_program_gets_all_files(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*SYSTEMD, "--json", "--", "--epochs", "3"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["engine"] == "systemd"
    assert found["run"] == "train"
    assert [each["name"] for each in found["files"]] == ["w5xde-train.service", "w5xde-train-node.service"]
    assert "--epochs 3\n" in found["files"][0]["text"]


def test_a_job_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("nowhere.py", "train.txt", "./folder/train"):
        Path("train.txt").touch()
        told = refused(capsys, "deploy", "k8s", name, "--image", "x:1")
        assert "error[W5-630]" in told
    Path("broken.py").write_text("job = (")
    assert "not a Python program" in refused(capsys, "deploy", "systemd", "broken.py", "--advertise", "a")
    # Its name would take the place of a module of Python's own.
    Path("json.py").write_text("job = 1")
    assert "error[W5-630]" in refused(capsys, "deploy", "k8s", "json.py", "--image", "x:1")


def test_a_module_that_would_be_left_behind_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    Path("helper.py").write_text("x = 1\n")
    Path("layers").mkdir()
    Path("layers/__init__.py").write_text("y = 1\n")
    Path("train.py").write_text("import helper\nimport layers\njob = 1\n")
    told = refused(capsys, *K8S, "--", "--ship", "layers")
    assert "error[W5-637]" in told
    assert "imports helper.py" in told
    assert "-- --ship layers,helper.py" in told
    assert main([*K8S, "--", "--ship", "layers,helper.py"]) == 0
    shown = capsys.readouterr().out
    assert '"layers..__init__.py": |\n    y = 1' in shown
    assert 'path: "layers/__init__.py"' in shown


def test_code_that_does_not_fit_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text(f"job = 1\n# {'x' * 1_000_000}\n")
    told = refused(capsys, *K8S)
    assert "error[W5-634]" in told
    assert "--job-in-image" in told


def test_a_job_in_the_image_is_not_looked_for_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", "k8s", "/app/mine.py:job", "--job-in-image", "--image", "x:1"]) == 0
    shown = capsys.readouterr().out
    assert "kind: ConfigMap" not in shown
    assert '- "/app/mine.py:job"' in shown
    assert "name: w5xde-mine-pool" in shown


@pytest.mark.parametrize(
    ("more", "code", "words"),
    [
        (["--name", "Tuesday_1"], "W5-631", "--name tuesday-1"),
        (["--name", "x" * 51], "W5-631", "at most 50"),
        (["--name", "a/b"], "W5-631", "--name tuesday"),
        (["--namespace", "my_space"], "W5-631", "namespace"),
        (["--nodes", "0"], "W5-210", "from 1 to 1000"),
        (["--storage", "20"], "W5-210", "20Gi"),
        (["--cpus-per-node", "many"], "W5-210", "500m"),
        (["--deadline", "soon"], "W5-210", "12h"),
        (["--access-mode", "ReadOnlyMany"], "W5-210", "invalid choice"),
        (["--image", "Not An Image"], "W5-210", "registry.example"),
        (["--node", "3"], "W5-210", "Did you mean --nodes?"),
        (["--", "--name", "other"], "W5-632", "before the --"),
        (["--", "--resume", "auto"], "W5-632", "already"),
        (["--", "--runs", "/data"], "W5-632", "--storage"),
        (["--", "--insecure"], "W5-632", "identity"),
        (["--", "--epoch", "3"], "W5-210", "Did you mean --epochs?"),
        (["--", "--batch-size", "0"], "W5-210", ""),
        (["--", "other.py"], "W5-210", "one word too many"),
    ],
)
def test_what_kubernetes_cannot_do_is_refused(
    more: list[str], code: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told = refused(capsys, *K8S, *more)
    assert f"error[{code}]" in told
    assert words in told


@pytest.mark.parametrize(
    ("more", "code"),
    [
        (["--advertise", "no host"], "W5-631"),
        (["--w5xde", "bin/w5xde"], "W5-638"),
        (["--w5xde", "/opt/my programs/w5xde"], "W5-638"),
        (["--read", "/data:/etc"], "W5-638"),
        (["--port", "80"], "W5-210"),
        (["--", "--host", "0.0.0.0"], "W5-632"),
    ],
)
def test_what_systemd_cannot_do_is_refused(
    more: list[str], code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"error[{code}]" in refused(capsys, *SYSTEMD, *more)


def test_a_job_that_the_units_user_cannot_read_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").chmod(0o600)
    told = refused(capsys, *SYSTEMD)
    assert "error[W5-639]" in told
    assert "chmod o+r" in told


def test_without_an_engine_there_is_help_and_an_unknown_one_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "error[W5-210]" in refused(capsys, "deploy", "nomad", "train.py")


def test_settings_that_lie_beside_the_job_go_along(capsys: pytest.CaptureFixture[str]) -> None:
    Path("w5xde.toml").write_text("batch-size = 64\n")
    assert main(K8S) == 0
    shown = capsys.readouterr().out
    assert '"w5xde.toml": |\n    batch-size = 64' in shown
    assert "workingDir: /job" in shown


def test_it_is_a_command_like_any_other(folder: Path) -> None:
    done = run_python("-m", "w5xde", *K8S, cwd=folder, variables={"W5XDE_STATE": os.devnull})
    assert done.returncode == 0, done.stderr
    assert "kind: Service" in done.stdout
