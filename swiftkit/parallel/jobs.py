"""Job files for several nodes: Slurm, Kubernetes, or plain ssh. They are printed; nothing is started.

On every node torchrun meets the others (c10d rendezvous), starts one worker a GPU, and after a failure starts
all of them again, up to `max_restarts` times; the workers go on from the last checkpoint.
Source: https://docs.pytorch.org/docs/stable/elastic/run.html
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import yaml

from swiftkit.errors import UserError
from swiftkit.parallel.options import LaunchConfig

RESUME = ("--resume_from_checkpoint", "auto")
NAME = re.compile(r"[^a-z0-9]+")
HOST = re.compile(r"(?:[A-Za-z0-9_][\w.-]*@)?[A-Za-z0-9][A-Za-z0-9.-]*")
GRACE = 120  # seconds between the warning and the end: a worker saves the step it is at
NETWORK_HINTS = (
    "# Where NCCL finds the wrong network by itself, say which (ip addr; ibv_devices; swiftkit doctor):",
    "# export NCCL_SOCKET_IFNAME=eth0      # for meeting, and for data where there is no InfiniBand",
    "# export NCCL_IB_HCA=mlx5             # InfiniBand or RoCE cards for data",
    "# export NCCL_DEBUG=INFO              # says what was taken",
)


def job_file(config: LaunchConfig) -> str:
    """The job file, as text.

    Args:
        config: for whom, how many, and what is run.

    Raises:
        UserError: for a config file that cannot be read, and for a name that a scheduler could not take.
    """
    _readable(Path(config.file))
    makers = {"slurm": slurm, "k8s": kubernetes, "ssh": ssh}
    return makers[config.scheduler](config)


def _readable(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{file}: no such file") from None
    except (OSError, UnicodeDecodeError) as failure:
        raise UserError(f"{file} cannot be read as UTF-8 text: {failure}") from None


def job_name(config: LaunchConfig) -> str:
    """A name that DNS takes, as Kubernetes wants it: small letters, digits and dashes.

    Raises:
        UserError: where nothing is left of what was given.
    """
    given = config.name or f"{config.verb}-{Path(config.file).stem}"
    name = NAME.sub("-", given.lower()).strip("-")[:50].strip("-")
    if not name:
        raise UserError(f"--name {given}: at least one letter or digit, as it becomes the name of the job")
    return name if name[0].isalpha() else f"job-{name}"


def torchrun(
    config: LaunchConfig, *, nodes: int, endpoint: str, run_id: str, file: str, extra: Sequence[str] = ()
) -> list[str]:
    """The command of one node, each word ready for a shell.

    Args:
        config: how many workers, how often they are started again, what they do.
        nodes: machines.
        endpoint: the first node and its port; may hold shell variables.
        run_id: names this rendezvous; may hold shell variables.
        file: the config as the worker finds it.
        extra: more of torchrun's options.
    """
    return [
        "torchrun",
        f"--nnodes={nodes}",
        f"--nproc-per-node={config.gpus_per_node}",
        f"--max-restarts={config.max_restarts}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint}",
        f"--rdzv-id={run_id}",
        *extra,
        "-m swiftkit",
        config.verb,
        shlex.quote(file),
        " ".join(RESUME),
    ]


def _lines(words: Sequence[str], indent: str = "    ") -> str:
    """One word a line, with a backslash behind each but the last."""
    return f" \\\n{indent}".join(words)


def slurm(config: LaunchConfig) -> str:
    """A script for sbatch; submit it where the config file is."""
    optional = (("time", config.time), ("partition", config.partition), ("account", config.account))
    flags = {
        "job-name": job_name(config),
        "nodes": config.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": config.gpus_per_node,
        "cpus-per-task": config.gpus_per_node * config.cpus_per_gpu,
        **{name: _word(name, value) for name, value in optional if value is not None},
        "output": "%x-%j.log",
        "open-mode": "append",
        "requeue": None,
        "signal": f"TERM@{GRACE}",
    }
    head = [f"#SBATCH --{name}" + ("" if value is None else f"={value}") for name, value in flags.items()]
    command = torchrun(
        config,
        nodes=config.nodes,
        endpoint=f'"${{nodes[0]}}:{config.port}"',
        run_id='"${SLURM_JOB_ID}"',
        file=config.file,
    )
    return "\n".join([
        "#!/usr/bin/env bash",
        *head,
        "#",
        f"# {config.nodes} x {config.gpus_per_node} GPUs. Submit with: sbatch THIS_FILE",
        f"# Slurm warns {GRACE} s before the time is over, and starts the job again when a node is lost;",
        "# either way the run goes on from its last checkpoint.",
        "",
        "set -euo pipefail",
        *_setup(config),
        *NETWORK_HINTS,
        "export OMP_NUM_THREADS=1",
        "",
        'mapfile -t nodes < <(scontrol show hostnames "${SLURM_JOB_NODELIST}")',
        # srun does not take the number of cores over by itself (Slurm 22.05 and newer).
        f'srun --kill-on-bad-exit=1 --cpus-per-task="${{SLURM_CPUS_PER_TASK}}" {_lines(command)}',
        "",
    ])  # fmt: skip


def _word(name: str, value: str) -> str:
    """A value for a #SBATCH line, which knows no quotes."""
    if not re.fullmatch(r"[\w.,:+@/-]+", value):
        raise UserError(f"--{name} {value!r}: letters, digits and ._,:+@/- only, for an #SBATCH line")
    return value


def _setup(config: LaunchConfig) -> list[str]:
    return [] if config.setup is None else [config.setup]


def ssh(config: LaunchConfig) -> str:
    """A script that starts torchrun on every machine by ssh, and ends all when one fails."""
    for host in config.hosts:
        if not HOST.fullmatch(host):
            raise UserError(f"--hosts {host!r} is no name of a machine (name, address, or user@name)")
    first = config.hosts[0].rpartition("@")[2]
    command = torchrun(
        config,
        nodes=len(config.hosts),
        endpoint=f"{first}:{config.port}",
        run_id=job_name(config),
        file=config.file,
    )
    remote = [
        "set -euo pipefail",
        f"cd {shlex.quote(config.workdir or str(Path.cwd()))}",
        *_setup(config),
        "export OMP_NUM_THREADS=1",
        *NETWORK_HINTS,
        f"exec {_lines(command)}",
    ]
    # Quoted for the machine's own shell, whichever it is; here it is a here-document, taken as it stands.
    worker = f"bash -c {shlex.quote(chr(10).join(remote))}"
    return "\n".join([
        "#!/usr/bin/env bash",
        f"# {len(config.hosts)} machines x {config.gpus_per_node} GPUs. Run it anywhere: bash THIS_FILE",
        "# Every machine sees the same files under the same path, and ssh asks no password.",
        "# When one fails, or on Ctrl-C, all are ended; run it again to go on from the last checkpoint.",
        "",
        "set -euo pipefail",
        f"hosts=({' '.join(map(shlex.quote, config.hosts))})",
        "read -r -d '' worker <<'WORKER' || true",
        worker,
        "WORKER",
        "",
        "pids=()",
        "finish() {",
        "    trap - EXIT",
        '    kill "${pids[@]}" 2>/dev/null || true  # ends ssh; its terminal takes torchrun with it',
        "    wait || true",
        "}",
        "trap finish EXIT",
        "trap 'exit 130' INT TERM",
        'for host in "${hosts[@]}"; do',
        '    ssh -tt -o BatchMode=yes -o ServerAliveInterval=30 "${host}" "${worker}" \\',
        '        </dev/null > >(sed -u "s/^/${host}: /") 2>&1 &',
        '    pids+=("$!")',
        "done",
        'for _ in "${hosts[@]}"; do',
        "    wait -n  # the first that fails ends the script, and so all",
        "done",
        "",
    ])  # fmt: skip


# ---- Kubernetes ----------------------------------------------------------------------------------------


def kubernetes(config: LaunchConfig) -> str:
    """A manifest: the config file, a headless Service that gives names, and an Indexed Job of all nodes."""
    name = job_name(config)
    inside = f"/config/{_key(config.file)}"
    command = torchrun(
        config,
        nodes=config.nodes,
        endpoint=f"{name}-0.{name}:{config.port}",
        run_id=name,
        file=inside,
        extra=['--rdzv-conf="is_host=${is_host},join_timeout=900"'],
    )
    script = "\n".join([
        "set -euo pipefail",
        *_setup(config),
        *NETWORK_HINTS,
        'if [ "${JOB_COMPLETION_INDEX}" = 0 ]; then is_host=true; else is_host=false; fi',
        f"exec {_lines(command)}",
        "",
    ])  # fmt: skip
    parts = [_config_map(config, name), _service(config, name), _job(config, name, script)]
    head = [
        f"# {config.nodes} pods x {config.gpus_per_node} GPUs. Start with: kubectl apply -f THIS_FILE",
        f"# Follow with: kubectl logs -f job/{name}   End with: kubectl delete -f THIS_FILE",
        "# A pod that is lost comes back, and the run goes on from its last checkpoint, which therefore lies",
        "# on a volume that all pods share: "
        + (config.volume_claim or "none is given yet (--volume_claim NAME)"),
    ]
    return "\n".join(head) + "\n" + "---\n".join(_dump(part) for part in parts)


def _key(file: str) -> str:
    """The config's name as a key of a ConfigMap."""
    return re.sub(r"[^\w.-]", "-", Path(file).name, flags=re.ASCII)


def _meta(config: LaunchConfig, name: str) -> dict[str, object]:
    found: dict[str, object] = {"name": name, "labels": {"app": name}}
    return found | ({"namespace": config.namespace} if config.namespace else {})


def _config_map(config: LaunchConfig, name: str) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _meta(config, name),
        "data": {_key(config.file): _readable(Path(config.file))},
    }


def _service(config: LaunchConfig, name: str) -> dict[str, object]:
    """Without an address of its own: it gives each pod a name, before it is ready too."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _meta(config, name),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"app": name},
            "ports": [{"name": "rendezvous", "port": config.port}],
        },
    }


def _job(config: LaunchConfig, name: str, script: str) -> dict[str, object]:
    mounts = [{"name": "config", "mountPath": "/config"}, {"name": "shm", "mountPath": "/dev/shm"}]
    volumes: list[dict[str, object]] = [
        {"name": "config", "configMap": {"name": name}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    if config.volume_claim:
        mounts.append({"name": "workspace", "mountPath": "/workspace"})
        volumes.append({"name": "workspace", "persistentVolumeClaim": {"claimName": config.volume_claim}})
    container = {
        "name": "worker",
        "image": config.image,
        "command": ["bash", "-c", script],
        "workingDir": "/workspace",
        "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
        "ports": [{"containerPort": config.port}],
        "resources": {"limits": {"nvidia.com/gpu": config.gpus_per_node}},
        "volumeMounts": mounts,
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _meta(config, name),
        "spec": {
            "completionMode": "Indexed",
            "completions": config.nodes,
            "parallelism": config.nodes,
            "backoffLimit": config.max_restarts * config.nodes,
            "template": {
                "metadata": {"labels": {"app": name}},
                "spec": {
                    "subdomain": name,
                    "restartPolicy": "Never",
                    "terminationGracePeriodSeconds": GRACE,
                    "containers": [container],
                    "volumes": volumes,
                },
            },
        },
    }


class _Dumper(yaml.SafeDumper):
    """Texts of several lines stand as they are."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def _dump(part: dict[str, object]) -> str:
    return yaml.dump(part, Dumper=_Dumper, sort_keys=False, width=110)
