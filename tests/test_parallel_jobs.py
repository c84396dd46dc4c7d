"""Job files: valid for their readers, quoted whatever the names are, and run with the schedulers' stand-ins.

No Slurm, no ssh server and no cluster are here: small scripts of their names hand the command on and note it.
"""

from __future__ import annotations

import os
import random
import shlex
import stat
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from swiftkit.cli import main
from swiftkit.errors import UserError
from swiftkit.parallel.jobs import job_file, job_name
from swiftkit.parallel.options import LaunchConfig
from tests import tiny

CASES = Path(__file__).parent / "cases" / "jobs"
CONFIG = "model: smollm2-135m\ndataset: swiftkit::persona\n"
KINDS: dict[str, dict[str, Any]] = {
    "slurm": {"time": "24:00:00", "partition": "gpu"},
    "k8s": {"image": "registry.example/swiftkit:1"},
    "ssh": {"hosts": ["node1", "me@node2"], "workdir": "/data/run"},
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text(CONFIG, encoding="utf-8")
    return tmp_path


def job(kind: str, file: str = "my.yaml", **knobs: Any) -> str:
    return job_file(LaunchConfig(scheduler=kind, file=file, **{**KINDS[kind], **knobs}))  # type: ignore[arg-type]


def manifest(text: str) -> dict[str, Any]:
    return {part["kind"]: part for part in yaml.safe_load_all(text)}


def check_shell(script: str) -> None:
    """What bash itself says of it, without running it."""
    checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
    assert (checked.returncode, checked.stderr) == (0, "")


def stand_in(folder: Path, name: str, body: str) -> None:
    file = folder / "bin" / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"#!/usr/bin/env bash\n{body}\n", encoding="utf-8")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


def run(script: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", script],
        env={**os.environ, "PATH": path, **variables},
        cwd=folder,
        text=True,
        capture_output=True,
        timeout=120,
    )


def note_torchrun(folder: Path) -> None:
    """A torchrun that notes its words, one a line, and nothing else."""
    stand_in(folder, "torchrun", 'printf "%s\\n" "$@"')


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_is_the_one_we_know(kind: str) -> None:
    """A change of a job file is meant; the known ones lie in tests/cases/jobs."""
    text = job(kind, nodes=2)
    assert text == (CASES / f"{kind}.txt").read_text(encoding="utf-8")


def expected_words(nodes: int, endpoint: str, run_id: str, file: str, *extra: str) -> list[str]:
    return [
        f"--nnodes={nodes}", "--nproc-per-node=8", "--max-restarts=3", "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint}:29500", f"--rdzv-id={run_id}", *extra,
        "-m", "swiftkit", "sft", file, "--resume_from_checkpoint", "auto",
    ]  # fmt: skip


NASTY = ["my run.yaml", "it's.yaml", 'a "b".yaml', "$(touch HACKED).yaml", "`x`;&|.yaml", "ü ☃.yaml"]


@pytest.mark.parametrize("file", ["my.yaml", *NASTY])
def test_slurm_hands_over_exactly_these_words(folder: Path, file: str) -> None:
    (folder / file).write_text(CONFIG, encoding="utf-8")
    script = job("slurm", file, nodes=3)
    check_shell(script)
    note_torchrun(folder)
    stand_in(folder, "scontrol", "printf 'n1\\nn2\\nn3\\n'")
    stand_in(folder, "srun", 'while [[ $1 == --* ]]; do shift; done; exec "$@"')
    ran = run(script, folder, SLURM_JOB_ID="77", SLURM_JOB_NODELIST="n[1-3]", SLURM_CPUS_PER_TASK="96")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == expected_words(3, "n1", "77", file)
    assert not (folder / "HACKED").exists()


def test_slurm_head() -> None:
    lines = job("slurm", nodes=4, gpus_per_node=2, cpus_per_gpu=6, account="abc").splitlines()
    flags = dict(
        line.removeprefix("#SBATCH --").split("=") for line in lines if "=" in line and "SBATCH" in line
    )
    assert flags["nodes"] == "4"
    assert flags["ntasks-per-node"] == "1"
    assert flags["gpus-per-node"] == "2"
    assert flags["cpus-per-task"] == "12"
    assert (flags["time"], flags["partition"], flags["account"]) == ("24:00:00", "gpu", "abc")
    assert "#SBATCH --requeue" in lines
    # Slurm reads #SBATCH lines up to the first command only.
    last = max(at for at, line in enumerate(lines) if line.startswith("#SBATCH"))
    assert all(line.startswith("#") for line in lines[:last])
    with pytest.raises(UserError, match="--partition 'gpu two'"):
        job("slurm", partition="gpu two")


@pytest.mark.parametrize("file", ["my.yaml", *NASTY])
def test_ssh_hands_over_exactly_these_words(folder: Path, file: str) -> None:
    (folder / file).write_text(CONFIG, encoding="utf-8")
    where = folder / "it's here"
    where.mkdir()
    script = job("ssh", file, workdir=str(where), setup="export SETUP='as said'; pwd >&2")
    check_shell(script)
    note_torchrun(folder)
    # What sshd does: the words are joined and given to the user's shell.
    stand_in(
        folder, "ssh", 'while [[ $1 == -* ]]; do [[ $1 == -o ]] && shift; shift; done; shift; sh -c "$*"'
    )
    ran = run(script, folder)
    assert ran.returncode == 0, ran.stderr
    for host in ("node1", "me@node2"):
        said = [line.removeprefix(f"{host}: ") for line in ran.stdout.splitlines() if line.startswith(host)]
        assert [line for line in said if line != str(where)] == expected_words(2, "node1", job_name(
            LaunchConfig(scheduler="ssh", file=file, hosts=["a"])), file)  # fmt: skip
        assert str(where) in said
    assert not (folder / "HACKED").exists()


def test_ssh_ends_all_when_one_fails(folder: Path) -> None:
    script = job("ssh", workdir=str(folder))
    # The second machine fails at once; the first would go on for a minute.
    stand_in(
        folder,
        "ssh",
        "while [[ $1 == -* ]]; do [[ $1 == -o ]] && shift; shift; done\n"
        "[[ $1 == me@node2 ]] && exit 7\n"
        "echo $$ > first.pid; exec sleep 60",
    )
    ran = run(script, folder)
    assert ran.returncode == 7
    pid = folder / "first.pid"
    assert not pid.exists() or not Path(f"/proc/{pid.read_text().strip()}").exists()


@pytest.mark.parametrize("file", ["my.yaml", *NASTY])
def test_kubernetes(folder: Path, file: str) -> None:
    (folder / file).write_text(CONFIG, encoding="utf-8")
    parts = manifest(job("k8s", file, nodes=4, volume_claim="data", namespace="train", name="Big Run!"))
    assert list(parts) == ["ConfigMap", "Service", "Job"]
    assert {part["metadata"]["name"] for part in parts.values()} == {"big-run"}
    assert {part["metadata"]["namespace"] for part in parts.values()} == {"train"}
    ((key, content),) = parts["ConfigMap"]["data"].items()
    assert content == CONFIG
    assert set(key) <= set(string.ascii_letters + string.digits + "._-")

    service, spec = parts["Service"]["spec"], parts["Job"]["spec"]
    assert service["clusterIP"] == "None" and service["publishNotReadyAddresses"] is True
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 4, 4)
    pod = spec["template"]["spec"]
    assert pod["subdomain"] == parts["Service"]["metadata"]["name"]
    assert service["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }

    note_torchrun(folder)
    *shell, script = container["command"]
    assert shell == ["bash", "-c"]
    check_shell(script)
    for index in (0, 3):
        ran = run(script, folder, JOB_COMPLETION_INDEX=str(index))
        assert ran.returncode == 0, ran.stderr
        host = f"--rdzv-conf=is_host={'true' if index == 0 else 'false'},join_timeout=900"
        words = expected_words(4, "big-run-0.big-run", "big-run", f"/config/{key}", host)
        assert ran.stdout.splitlines() == words
    assert not (folder / "HACKED").exists()


def test_names_are_names_everywhere(seed: int) -> None:
    """Whatever a run is called, its job has a name that DNS takes."""
    draw = random.Random(seed)
    for _ in range(200):
        given = "".join(draw.choices(string.printable + "üñ☃", k=draw.randint(1, 80)))
        try:
            name = job_name(LaunchConfig(scheduler="slurm", file="my.yaml", name=given))
        except UserError:
            assert not any(letter in string.ascii_letters + string.digits for letter in given)
            continue
        assert set(name) <= set(string.ascii_lowercase + string.digits + "-")
        assert name[0].isalpha() and name[-1].isalnum() and len(name) <= 54


def complaint(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["launch", *words])
    assert end.value.code == 2
    heard = capsys.readouterr()
    assert heard.out == ""
    return heard.err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("", "launch takes slurm, k8s or ssh, then a config file"),
        ("slurm", "launch takes slurm, k8s or ssh, then a config file"),
        ("slrum my.yaml", "--scheduler takes slurm, k8s or ssh, not slrum; did you mean slurm?"),
        ("slurm no.yaml", "no.yaml: no such file"),
        ("slurm bad.yaml", "bad.yaml:2: unknown name --datset; did you mean --dataset?"),
        ("k8s my.yaml", "k8s needs --image"),
        ("ssh my.yaml", "ssh needs --hosts"),
        ("ssh my.yaml --hosts a b --nodes 3", "--nodes 3 and 2 --hosts"),
        ("ssh my.yaml --hosts -oProxyCommand=x", "--hosts"),
        ("ssh my.yaml --hosts a;b", "--hosts 'a;b' is no name of a machine"),
        ("slurm my.yaml --nodes 0", "--nodes takes at least 1, not 0"),
    ],
)
def test_mistakes(words: str, sentence: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "bad.yaml").write_text("model: smollm2-135m\ndatset: swiftkit::persona\n", encoding="utf-8")
    assert sentence in complaint(capsys, *words.split())


def test_the_command_prints_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["launch", "slurm", "my.yaml", "--nodes", "2", "--time", "24:00:00", "--partition", "gpu"])
    assert end.value.code == 0
    assert capsys.readouterr().out == job("slurm", nodes=2)


@pytest.mark.slow
def test_torchrun_itself_takes_it(folder: Path) -> None:
    """The real torchrun, meeting itself on one node, starts a real run; a second start goes on from it."""
    model = folder / "toy"
    tiny.make_toy(model, template="chatml")
    config = {
        "model": str(model),
        "dataset": "swiftkit::persona#6",
        "max_steps": 2,
        "sample_prompts": "none",
        "report_to": "none",
    }
    (folder / "my.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    stand_in(folder, "scontrol", "echo localhost")
    stand_in(folder, "srun", 'while [[ $1 == --* ]]; do shift; done; exec "$@"')
    stand_in(folder, "torchrun", f'exec {shlex.quote(sys.executable)} -m torch.distributed.run "$@"')
    script = job("slurm", gpus_per_node=1, port=29617)
    for _ in range(2):
        ran = run(script, folder, SLURM_JOB_ID="1", SLURM_JOB_NODELIST="x", SLURM_CPUS_PER_TASK="1")
        assert ran.returncode == 0, ran.stderr
    (checkpoint,) = folder.glob("output/*/v*/checkpoint-2")
    assert (checkpoint / "adapter_model.safetensors").is_file()
