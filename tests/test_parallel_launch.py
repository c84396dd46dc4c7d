"""Starting workers: what is planned, what each kind of end looks like, and that no process is left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from swiftkit.errors import UserError
from swiftkit.parallel import launch, worker
from swiftkit.parallel.launch import Launch, plan_launch
from swiftkit.train.artifact import read_model
from swiftkit.train.checkpoint import PARTS, damage
from tests import tiny
from tests.training import logged, losses, saved

ROOT = Path(__file__).resolve().parents[1]
FOR_EVER = ("--max_steps", "100000", "--save_steps", "100000")


# ---- the plan --------------------------------------------------------------------------------------------


def plan(asked: int | str = "auto", device: str = "auto", *, gpus: int = 0, **environment: str) -> Launch:
    found = plan_launch(asked, device, environment=environment, gpus=gpus)
    assert found is not None
    return found


def test_every_visible_gpu_gets_a_process_unless_somebody_says_otherwise() -> None:
    assert plan(gpus=8).processes == 8 and plan(gpus=8).device == "cuda"
    assert plan(gpus=8, NPROC_PER_NODE="2").processes == 2
    assert plan(4, gpus=8, NPROC_PER_NODE="2").processes == 4
    assert plan(device="cpu", gpus=8).processes == 1
    assert plan(NPROC_PER_NODE="2").device == "cpu"
    assert not plan().several and not plan(gpus=1).several


def test_inside_torchrun_nothing_is_started() -> None:
    assert plan_launch("auto", "auto", environment={"RANK": "0", "WORLD_SIZE": "2"}, gpus=2) is None


def test_several_nodes_meet_where_the_environment_says() -> None:
    found = plan(gpus=8, NNODES="4", NODE_RANK="2", MASTER_ADDR="node0")
    assert (found.nodes, found.node_rank, found.address, found.port) == (4, 2, "node0", 29500)
    assert plan(gpus=1, NNODES="2", MASTER_ADDR="node0").several
    assert "rank 17: GPU 1: swiftkit" in found.describe(["swiftkit"])


@pytest.mark.parametrize(
    ("asked", "gpus", "environment", "words"),
    [
        (9, 8, {}, "--nproc_per_node 9: give 1 to 8"),
        ("auto", 8, {"NPROC_PER_NODE": "9"}, "NPROC_PER_NODE 9: give 1 to 8"),
        ("auto", 8, {"NPROC_PER_NODE": "all"}, "NPROC_PER_NODE is a number, not 'all'"),
        ("auto", 0, {"NPROC_PER_NODE": "0"}, "NPROC_PER_NODE 0: give at least 1"),
        ("auto", 1, {"CUDA_VISIBLE_DEVICES": "0,9"}, "names 2 GPUs, and torch sees 1 of them"),
        ("auto", 0, {"CUDA_VISIBLE_DEVICES": "7"}, "names 1 GPU, and torch sees 0 of them"),
        ("auto", 8, {"NNODES": "2"}, "NNODES 2: give MASTER_ADDR"),
        ("auto", 8, {"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a"}, "NODE_RANK 2 of NNODES 2"),
    ],
)
def test_what_cannot_start_is_said_in_one_line(
    asked: int | str, gpus: int, environment: dict[str, str], words: str
) -> None:
    with pytest.raises(UserError, match=words) as refusal:
        plan(asked, gpus=gpus, **environment)
    assert "\n" not in str(refusal.value)


def test_the_error_that_others_followed_from_comes_first(tmp_path: Path) -> None:
    def failed(codes: dict[int, int], *told: worker.Failure) -> BaseException:
        for failure in told:
            worker.write(tmp_path, failure)
        return launch._what_failed(codes, worker.failures(tmp_path), tmp_path, processes=2)

    killed = failed({0: -signal.SIGTERM, 1: -signal.SIGKILL})
    assert str(killed).startswith("rank 1: its process was killed by SIGKILL")
    followed = worker.Failure(0, "PeerLostError: closed", "trace", follows=True, time=1.0)
    assert str(failed({0: 1, 1: -signal.SIGKILL}, followed)).startswith("rank 1: its process was killed")
    assert isinstance(failed({1: 143}), SystemExit)  # that rank alone was told to stop
    own = worker.Failure(1, "ValueError: odd (a.py:3)", "trace", follows=False, time=2.0)
    assert str(failed({0: 1, 1: 1}, own)) == "rank 1: ValueError: odd (a.py:3)"


# ---- real processes --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    tiny.make_toy(folder / "toy", template="chatml")
    rows = [{"prompt": f"say {n}: ", "completion": "abcd"[: 1 + n % 4]} for n in range(12)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def words_of(inputs: Path, output: Path, *more: str) -> list[str]:
    silent = () if "--sample_prompts" in more else ("--sample_prompts", "none")
    return [
        "sft", "--model", str(inputs / "toy"), "--dataset", str(inputs / "rows.jsonl"), "--output_dir",
        str(output), "--device", "cpu", "--packing", "false", "--logging_steps", "1", "--report_to", "none",
        "--global_batch_size", "4", *silent, *more,
    ]  # fmt: skip


def start(inputs: Path, output: Path, *more: str, processes: int = 2, **environment: str) -> subprocess.Popen:
    variables = {
        **os.environ, "OMP_NUM_THREADS": "1", "SWIFTKIT_CACHE": str(inputs / "cache"),
        "NPROC_PER_NODE": str(processes), "TMPDIR": str(output), **environment,
    }  # fmt: skip
    output.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-m", "swiftkit", *words_of(inputs, output, *more)], cwd=ROOT, env=variables,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def run_folder(output: Path) -> Path:
    (folder,) = (output / "toy").iterdir()
    return folder


def wait_for_steps(process: subprocess.Popen, output: Path, steps: int = 3) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        log = next(output.glob("toy/v*/logging.jsonl"), None)
        if log is not None and len(log.read_text().splitlines()) >= steps:
            return
        time.sleep(0.05)
    raise AssertionError(f"no step was trained: {process.communicate(timeout=60)}")


def workers(output: Path) -> list[int]:
    """Process ids, by rank."""
    files = sorted(output.glob("swiftkit-launch-*/pid-*.txt"))
    return [int(file.read_text()) for file in files]


def check_gone(numbers: list[int]) -> None:
    for number in numbers:
        with pytest.raises(ProcessLookupError):
            os.kill(number, 0)


@pytest.mark.slow
def test_two_processes_train_as_one_and_go_on_as_three(inputs: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    steps = ("--max_steps", "6", "--save_steps", "3")
    for output, processes in ((one, 1), (two, 2)):
        said, errors = start(inputs, output, *steps, processes=processes).communicate(timeout=200)
        assert "trained   loss" in said, errors
    assert "processes 2 (ddp 2), one a CPU" in said
    whole = losses(logged(run_folder(one)))
    np.testing.assert_allclose(losses(logged(run_folder(two))), whole, rtol=1e-5)
    # Cut it back to step 3, and go on with other numbers of processes.
    for output, processes in ((one, 3), (two, 1)):
        folder = run_folder(output)
        (folder / "checkpoint-6").rename(output / "away")
        resumed = start(inputs, output, *steps, "--resume_from_checkpoint", "auto", processes=processes)
        said, errors = resumed.communicate(timeout=200)
        assert "from step 3, 3 left" in said, said + errors
        np.testing.assert_allclose(losses(logged(folder)), whole, rtol=1e-5)
        assert saved(folder) == [3, 6]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout", "more", "tuner"),
    [
        (name, layout, more, tuner)
        for name, layout, more in (
            ("tp 2", ("--tensor_parallel_size", "2"), ()),
            ("fsdp 2", ("--layout", "fsdp"), ("--layout", "ddp")),
        )
        for tuner in ("lora", "full")
    ],
)  # fmt: skip
def test_a_model_cut_over_processes_trains_as_one_and_goes_on_in_other_layouts(
    name: str, layout: tuple[str, ...], more: tuple[str, ...], tuner: str, inputs: Path, tmp_path: Path
) -> None:
    """Losses, answers and files; from two parts to one process, and from one to four in parts."""
    one, two = tmp_path / "one", tmp_path / "two"
    steps = (
        "--max_steps", "6", "--save_steps", "3", "--tuner_type", tuner, "--sample_prompts", "say 1: ",
        "--sample_max_new_tokens", "8", "--learning_rate", "1e-2", "--eval_steps", "3",
        "--val_dataset", str(inputs / "rows.jsonl"),
    )  # fmt: skip
    for output, processes, asked in ((one, 1, ()), (two, 2, layout)):
        said, errors = start(inputs, output, *steps, *asked, processes=processes).communicate(timeout=200)
        assert "trained   loss" in said, errors
    assert f"processes 2 ({name}), one a CPU, each 2 with a model between them" in said
    whole = logged(run_folder(one))
    np.testing.assert_allclose(losses(logged(run_folder(two))), losses(whole), rtol=1e-5)
    answers = [json.loads((run_folder(output) / "samples.json").read_text()) for output in (one, two)]
    assert answers[0] == answers[1] and answers[0][0]["before"]
    written, wanted = (read_model(run_folder(output) / "checkpoint-6") for output in (two, one))
    assert {n: t.shape for n, t in written.items()} == {n: t.shape for n, t in wanted.items()}
    parts = run_folder(two) / "checkpoint-6" / PARTS
    assert parts.is_dir() == (tuner == "full" and name == "fsdp 2")
    assert not parts.is_dir() or len(list(parts.glob("*.safetensors"))) == 2  # a file of each process
    for output, processes, asked in ((one, 4, layout), (two, 1, more)):
        folder = run_folder(output)
        (folder / "checkpoint-6").rename(output / "away")
        going_on = (*steps, *asked, "--resume_from_checkpoint", "auto")
        said, errors = start(inputs, output, *going_on, processes=processes).communicate(timeout=200)
        assert "from step 3, 3 left" in said, said + errors
        for value in ("loss", "eval_loss", "grad_norm"):
            theirs = [[line[value] for line in lines if value in line] for lines in (logged(folder), whole)]
            np.testing.assert_allclose(*theirs, rtol=1e-5, err_msg=value)


@pytest.mark.slow
def test_from_python_a_run_comes_back(inputs: Path, tmp_path: Path) -> None:
    """Also where the calling script has no guard around its main part."""
    script = tmp_path / "script.py"
    script.write_text(
        "import swiftkit\nfrom swiftkit.errors import UserError\n"
        f"run = swiftkit.sft(model={str(inputs / 'toy')!r}, device='cpu', "
        f"dataset={str(inputs / 'rows.jsonl')!r}, output_dir={str(tmp_path / 'out')!r}, max_steps=2, "
        "sample_prompts='none', report_to='none', nproc_per_node=2, packing=False)\n"
        "print('came back', run.folder, run.args['machine']['processes'])\n"
        "try:\n    swiftkit.sft(run.folder / 'args.json', max_length=100_000, nproc_per_node=2)\n"
        "except UserError as refusal:\n    print('refused', refusal)\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, script], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert f"came back {run_folder(tmp_path / 'out')} 2" in done.stdout, done.stderr
    assert "refused --max_length 100000 is more than the model's context" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("to", ["the launcher", "one worker"])
def test_a_signal_saves_and_exits_with_its_own_code(
    to: str, number: int, code: int, inputs: Path, tmp_path: Path
) -> None:
    process = start(inputs, tmp_path, *FOR_EVER)
    wait_for_steps(process, tmp_path)
    numbers = workers(tmp_path)
    os.kill(process.pid if to == "the launcher" else numbers[1], number)
    said, errors = process.communicate(timeout=60)
    assert process.returncode == code, said + errors
    folder = run_folder(tmp_path)
    last = saved(folder)[-1]
    assert damage(folder / f"checkpoint-{last}") is None
    assert [line["step"] for line in logged(folder)] == list(range(1, last + 1))
    check_gone(numbers)


@pytest.mark.slow
def test_a_killed_worker_is_named_and_ends_all(inputs: Path, tmp_path: Path) -> None:
    process = start(inputs, tmp_path, *FOR_EVER)
    wait_for_steps(process, tmp_path)
    numbers = workers(tmp_path)
    os.kill(numbers[1], signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.strip().startswith("swiftkit: rank 1: its process was killed by SIGKILL"), errors
    assert len(errors.strip().splitlines()) == 1, errors
    check_gone(numbers)


@pytest.mark.slow
def test_workers_save_and_end_when_the_launcher_is_killed(inputs: Path, tmp_path: Path) -> None:
    process = start(inputs, tmp_path, *FOR_EVER)
    wait_for_steps(process, tmp_path)
    numbers = workers(tmp_path)
    process.kill()
    process.communicate(timeout=60)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and any(Path(f"/proc/{number}").exists() for number in numbers):
        time.sleep(0.2)
    check_gone(numbers)
    assert damage(run_folder(tmp_path) / f"checkpoint-{saved(run_folder(tmp_path))[-1]}") is None


def plant(fault: str, folder: Path) -> str:
    """A path whose module, imported as Python starts, makes a fault of rank 1's third step."""
    planted = folder / "planted"
    planted.mkdir()
    (planted / "sitecustomize.py").write_text(
        "import os\nif os.environ.get('RANK') == '1':\n"
        "    from swiftkit.engine import Engine\n"
        "    whole, steps = Engine.forward_backward, []\n"
        "    def broken(*args, **options):\n        steps.append(0)\n"
        f"        if len(steps) == 3:\n            {fault}\n"
        "        return whole(*args, **options)\n    Engine.forward_backward = broken\n"
    )
    return f"{planted}{os.pathsep}{ROOT}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        ("raise ValueError('planted')", 1, "swiftkit: rank 1: ValueError: planted ("),
        ("from swiftkit.errors import UserError; raise UserError('mend it')", 2, "swiftkit: rank 1: mend it"),
    ],
)
def test_one_rank_that_fails_ends_all_with_its_own_error(
    fault: str, code: int, words: str, inputs: Path, tmp_path: Path
) -> None:
    process = start(inputs, tmp_path / "out", *FOR_EVER, PYTHONPATH=plant(fault, tmp_path))
    wait_for_steps(process, tmp_path / "out", steps=1)
    begun = time.monotonic()
    _, errors = process.communicate(timeout=100)
    assert time.monotonic() - begun < 60
    assert process.returncode == code
    assert errors.strip().startswith(words), errors
    if code == 1:
        assert "sitecustomize.py:" in errors.splitlines()[0]
    assert not list((tmp_path / "out").glob("swiftkit-launch-*"))


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--tensor_parallel_size", "2"), ("--layout", "fsdp")], ids=str)
def test_a_rank_that_others_wait_for_is_named(more: tuple[str, ...], inputs: Path, tmp_path: Path) -> None:
    """With the step and the line that each is at, and the call; the run goes on when it can."""
    said_so = f"pathlib.Path({str(tmp_path / 'said')!r}).exists()"
    waits = f"import time, pathlib; any(time.sleep(1) or {said_so} for _ in range(90))"
    process = start(
        inputs, tmp_path / "out", "--max_steps", "4", "--hang_timeout", "3", *more,
        PYTHONPATH=plant(waits, tmp_path),
    )  # fmt: skip
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if "the others wait for" in line:
            (tmp_path / "said").touch()
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    words = "".join(said)
    assert words.count("the others wait for rank 1\n") == 1, words
    assert "after step 2: forward and backward has taken" in words
    (first,) = [line for line in said if line.startswith("rank 0: ")]
    (second,) = [line for line in said if line.startswith("rank 1: ")]
    assert first.startswith("rank 0: after step 2, forward and backward for ") and "last call gloo:" in first
    assert "/parallel/" in first or "/engine/" in first
    assert "swiftkit/train/loop.py:" in second and " in step, last call gloo:" in second
    recorded = json.loads((run_folder(tmp_path / "out") / "collective-calls-rank-0.json").read_text())
    assert recorded["fr"]["entries"][-1]["profiling_name"].startswith("gloo:")


@pytest.mark.slow
def test_a_mistake_of_all_ranks_is_said_once(inputs: Path, tmp_path: Path) -> None:
    bad = inputs / "bad.jsonl"
    bad.write_text('{"prompt": "a", "completion": "b"}\n{"prompt": \n')
    process = start(inputs, tmp_path, "--val_dataset", str(bad))
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 2
    assert len(errors.strip().splitlines()) == 1 and f"{bad}:2" in errors, errors


@pytest.mark.slow
def test_a_taken_port_is_named(inputs: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = start(inputs, tmp_path, "--max_steps", "2", MASTER_PORT=str(port))
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert f"MASTER_PORT {port}: Address already in use" in errors
    assert len(errors.strip().splitlines()) == 1, errors


@pytest.mark.slow
def test_a_port_of_ones_own_and_two_nodes_on_one_machine(inputs: Path, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = str(probe.getsockname()[1])
    meet = dict(MASTER_ADDR="localhost", MASTER_PORT=port, NNODES="2")
    output = tmp_path / "out"
    nodes = [
        start(inputs, output, "--max_steps", "2", processes=1, NODE_RANK=str(rank), **meet)
        for rank in range(2)
    ]
    ended = [(node.communicate(timeout=120), node.returncode) for node in nodes]
    assert [code for _, code in ended] == [0, 0], ended
    assert "processes 2 on 2 nodes" in ended[0][0][0]
    assert len(losses(logged(run_folder(output)))) == 2


@pytest.mark.slow
def test_dry_run_prints_what_would_start(inputs: Path, tmp_path: Path) -> None:
    said, errors = start(inputs, tmp_path, "--dry_run").communicate(timeout=60)
    assert said.startswith("2 processes, 2 on each of 1 node, over gloo"), errors
    assert "rank 1: CPU 1: swiftkit sft --model" in said and "--dry_run" not in said
    assert not list(tmp_path.glob("toy/*"))
