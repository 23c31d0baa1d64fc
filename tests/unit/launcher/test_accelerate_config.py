"""`--accelerate-config`: what Accelerate's own launcher would tell its ranks, by its own code."""

from __future__ import annotations

import os
import shlex

import pytest
from adapter_frameworks import require

from resilience_sdk.errors import ConfigError
from resilience_sdk.launcher.accelerate_config import read
from resilience_sdk.launcher.options import parse_options, resume_command

FSDP = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
num_machines: {nodes}
machine_rank: 1
main_process_ip: head
main_process_port: 29777
num_processes: 4
mixed_precision: bf16
fsdp_config: {{fsdp_version: 2, fsdp_state_dict_type: SHARDED_STATE_DICT, fsdp_auto_wrap_policy: NO_WRAP}}
"""


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """Need Accelerate, and take back what an option sets."""
    require("accelerate")
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        monkeypatch.delenv(name)


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("")
    return str(path)


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "accelerate.yaml"
    path.write_text(FSDP.format(nodes=1))
    return path


def test_ranks_are_told_what_accelerate_tells_them(config, script):
    """The variables, and how many ranks there are; the launcher itself is left as it was."""
    before = dict(os.environ)
    assert read(str(config)).variables["FSDP_VERSION"] == "2"
    assert dict(os.environ) == before
    env = {"OMP_NUM_THREADS": "1"}
    options = parse_options(["--accelerate-config", str(config), script], env)
    assert options.elastic.nproc_per_node == "4"
    assert options.local
    told = {name: env[name] for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_MIXED_PRECISION", "FSDP_STATE_DICT_TYPE")}
    assert list(told.values()) == ["true", "bf16", "SHARDED_STATE_DICT"]


def test_the_command_line_counts_before_it(config, script):
    """As for Accelerate's own launcher; it is a part of the command that resumes the run."""
    options = parse_options(["--nproc-per-node", "2", "--accelerate-config", str(config), script], {})
    assert options.elastic.nproc_per_node == "2"
    assert f"--accelerate-config {shlex.quote(str(config))}" in resume_command(options, "/r")


def test_several_machines_meet_where_it_says(config):
    """Processes are counted over all of them."""
    config.write_text(FSDP.format(nodes=2))
    launch = read(str(config))
    assert (launch.nnodes, launch.nproc_per_node, launch.node_rank, launch.endpoint) == (2, 2, 1, "head:29777")


def test_a_missing_file_is_an_error(tmp_path):
    """With the command that makes one."""
    with pytest.raises(ConfigError, match="no such file; `accelerate config --config_file"):
        read(str(tmp_path / "none.yaml"))


@pytest.mark.parametrize("text", ["distributed_type: NOTHING_KNOWN", "]", "fsdp_config: 3\ndistributed_type: FSDP"])
def test_what_accelerate_does_not_take_is_an_error(config, text):
    """It names the file."""
    config.write_text(f"compute_environment: LOCAL_MACHINE\n{text}\n")
    with pytest.raises(ConfigError, match=r"accelerate.yaml: accelerate does not take it"):
        read(str(config))


def test_another_launcher_is_named_for_what_it_alone_can_do(config):
    """DeepSpeed has a launcher of its own."""
    config.write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nnum_processes: 2\n")
    with pytest.raises(ConfigError, match="DeepSpeed is started by `accelerate launch`"):
        read(str(config))
