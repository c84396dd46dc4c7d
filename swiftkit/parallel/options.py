"""The knobs of `swiftkit doctor` and `swiftkit launch`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from swiftkit.config import Auto, Config, Many, knob


class DoctorConfig(Config):
    """`swiftkit doctor`: is this machine ready? A line a check, good, weak or broken, with what mends it."""

    output_dir: str = knob("output", "where checkpoints will go; its disk is timed", group="doctor")
    as_json: bool = knob(False, "print lines and facts as JSON (--json is short for it)", group="doctor")
    bench: bool = knob(
        False, "measure matrix products, copies, and the links between GPUs, against what they should give",
        group="bench",
    )  # fmt: skip
    device: Literal["auto", "cpu", "cuda"] = knob(
        "auto", "what is measured; auto is GPUs where torch sees one", group="bench"
    )
    nproc: Annotated[int, Field(ge=1)] | Auto = knob(
        "auto", "that exchange data; auto is one a GPU, and 2 on a CPU", group="bench", unit="processes"
    )
    max_mib: Annotated[int, Field(ge=1)] | Auto = knob(
        "auto", "largest message; auto is 1,024 on GPUs and 16 on a CPU", group="bench", unit="MiB"
    )
    plot: str = knob("doctor-bench.png", "the curve of bandwidth by size; `none` draws none", group="bench")

    @field_validator("plot")
    @classmethod
    def _an_image(cls, value: str) -> str:
        if value != "none" and not value.endswith((".png", ".svg", ".pdf")):
            raise ValueError("a file that ends in .png, .svg or .pdf, or none")
        return value


class LaunchConfig(Config):
    """`swiftkit launch slurm|k8s|ssh my.yaml`: print a job file for several nodes; nothing is started.

    Every node runs torchrun, which meets the others (c10d rendezvous), starts `swiftkit sft my.yaml` once a
    GPU, and after a failure starts all of them again from the last checkpoint.
    """

    scheduler: Literal["slurm", "k8s", "ssh"] = knob(
        ..., "for whom the file is; stands in front, without its flag", group="job"
    )
    file: str = knob(..., "the run's config; stands behind the scheduler, without its flag", group="job")
    verb: Literal["sft", "dpo", "reward"] = knob("sft", "what is done with the config", group="job")
    nodes: int = knob(1, "machines", group="job", ge=1)
    gpus_per_node: int = knob(8, "processes on each machine, one a GPU", group="job", ge=1)
    max_restarts: int = knob(3, "times that the workers are started again after a failure", group="job", ge=0)
    port: int = knob(29500, "where the first node waits for the others", group="job", ge=1, le=65535)
    name: str | None = knob(None, "of the job; none is that of the config file", group="job")
    setup: str | None = knob(
        None, "a line of shell before torchrun, such as 'source .venv/bin/activate'", group="job"
    )
    time: str | None = knob(None, "slurm: longest time, such as 24:00:00 or 2-00:00:00", group="slurm")
    partition: str | None = knob(None, "slurm: queue", group="slurm")
    account: str | None = knob(None, "slurm: who pays", group="slurm")
    cpus_per_gpu: int = knob(12, "slurm: processor cores beside each GPU", group="slurm", ge=1)
    image: str | None = knob(None, "k8s: a container image with swiftkit in it", group="k8s")
    namespace: str | None = knob(None, "k8s: where the job lives; none is kubectl's own", group="k8s")
    volume_claim: str | None = knob(
        None, "k8s: PersistentVolumeClaim for data and output, at /workspace", group="k8s"
    )
    hosts: Many = knob([], "ssh: the machines, the first one leads", group="ssh")
    workdir: str | None = knob(
        None, "ssh: the folder on every machine; none is the one you are in", group="ssh"
    )

    @field_validator("setup")
    @classmethod
    def _one_line(cls, value: str | None) -> str | None:
        if value is not None and len(value.splitlines()) != 1:
            raise ValueError("one line of shell; join several with &&")
        return value

    @model_validator(mode="after")
    def _what_the_scheduler_needs(self) -> LaunchConfig:
        if self.scheduler == "k8s" and not self.image:
            raise ValueError("k8s needs --image, a container image with swiftkit in it")
        if self.scheduler == "ssh" and not self.hosts:
            raise ValueError("ssh needs --hosts, the names of the machines")
        if self.hosts and self.scheduler == "ssh" and self.nodes not in (1, len(self.hosts)):
            raise ValueError(f"--nodes {self.nodes} and {len(self.hosts)} --hosts; leave --nodes out")
        return self
