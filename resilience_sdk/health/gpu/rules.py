"""Every limit of the GPU checks, with its cure and where it comes from: the one table, also of the documentation.

A limit that the driver itself knows (its temperature thresholds, its power limit, its widest link) is asked for and
not written down here.
"""

from __future__ import annotations

from typing import Any

import attrs

from resilience_sdk.health.findings import Finding, Status

PROBE = "gpu"


@attrs.frozen(kw_only=True)
class Rule:
    """What is looked at, how much of it is too much, and what to do then.

    `limit` is in `unit`; None where the driver gives it, or where there is nothing to count. `growth_per_minute`
    is the limit of a counter's growth between two looks. `must`: a GPU that fails here is not to be used.
    """

    check: str
    looks_at: str
    cure: str
    source: str
    limit: float | None = None
    unit: str = ""
    growth_per_minute: float | None = None
    must: bool = False


_RESET = "end all its processes, then `nvidia-smi --gpu-reset -i N`, or reboot the node"
_ADMIN = "drain the node and run `dcgmi diag -r 3`; hand the GPU in for replacement if it fails"

RULES: dict[str, Rule] = {
    rule.check: rule
    for rule in (
        Rule(
            check="driver",
            looks_at="the NVML library, the kernel driver and the number of GPUs",
            cure="load the driver (`modprobe nvidia`); after an update reboot, so that library and kernel module match",
            source="NVML return codes",
            must=True,
        ),
        Rule(
            check="answers",
            looks_at="each GPU answers every question in time",
            cure=f"leave the node out; {_RESET}; look for `NVRM: Xid` 79, 119 or 120 in the kernel log",
            source="NVML return codes; Xid catalogue",
            unit="s",
            must=True,
        ),
        Rule(
            check="recovery_action",
            looks_at="what the driver says that this GPU needs before it is used again (driver 570 or newer)",
            cure="do what the driver says",
            source="NVIDIA GPU memory error management, recovery action flag",
            must=True,
        ),
        Rule(
            check="ecc_uncorrected_volatile",
            looks_at="uncorrectable ECC errors since the driver was loaded or the GPU reset",
            cure=f"{_RESET}; if they come back, {_ADMIN}",
            source="NVIDIA GPU memory error management; Meta's gcm check fails at 1",
            limit=1,
            unit="errors",
            growth_per_minute=0,
            must=True,
        ),
        Rule(
            check="ecc_uncorrected_aggregate",
            looks_at="uncorrectable ECC errors in the life of the GPU; old ones are remapped, only growth counts",
            cure=_ADMIN,
            source="NVIDIA GPU memory error management",
            unit="errors",
            growth_per_minute=0,
        ),
        Rule(
            check="ecc_corrected_volatile",
            looks_at="corrected ECC errors since the driver was loaded; a high rate announces Xid 92",
            cure=_ADMIN,
            source="DCGM limit of single bit errors, 10 a minute",
            unit="errors",
            growth_per_minute=10,
        ),
        Rule(
            check="ecc_mode",
            looks_at="ECC is on where the GPU has it",
            cure="`nvidia-smi -e 1 -i N`, then reset the GPU",
            source="NVIDIA GPU memory error management",
        ),
        Rule(
            check="row_remap_failure",
            looks_at="a faulty memory row could not be remapped (Xid 64)",
            cure="leave the node out and hand the GPU in for replacement",
            source="NVIDIA GPU memory error management, RMA policy",
            limit=1,
            must=True,
        ),
        Rule(
            check="row_remap_pending",
            looks_at="a row waits for the next reset to be remapped (Xid 63); work goes on until then",
            cure=f"after the job: {_RESET}",
            source="NVIDIA GPU memory error management, pending flag",
            limit=1,
        ),
        Rule(
            check="retired_pages",
            looks_at="memory pages that were retired (GPUs before Ampere); 60 is the end of the GPU",
            cure=_ADMIN,
            source="DCGM limits: 15 to watch, 60 to replace",
            limit=15,
            unit="pages",
            growth_per_minute=0,
            must=True,
        ),
        Rule(
            check="retired_pages_pending",
            looks_at="a page waits for the next reset to be retired",
            cure=f"after the job: {_RESET}",
            source="NVIDIA dynamic page retirement",
            limit=1,
        ),
        Rule(
            check="inforom",
            looks_at="the checksum of the GPU's InfoROM, which holds its error records",
            cure=_ADMIN,
            source="NVML_ERROR_CORRUPTED_INFOROM; Xid 93",
        ),
        Rule(
            check="throttle",
            looks_at="what slows the clocks down: heat, the power brake, the driver's own brakes",
            cure="check the node's cooling, fans and power supply; leave the node out if it stays",
            source="NVML clocks event reasons",
        ),
        Rule(
            check="temperature",
            looks_at="the GPU's temperature against the driver's slowdown and shutdown thresholds",
            cure="check cooling and fans of the node; it slows down now, and shuts down next",
            source="NVML temperature thresholds",
            unit="C",
        ),
        Rule(
            check="memory_temperature",
            looks_at="the temperature of the GPU's memory against the driver's limit",
            cure="check cooling and fans of the node",
            source="NVML_TEMPERATURE_THRESHOLD_MEM_MAX",
            unit="C",
        ),
        Rule(
            check="power_limit",
            looks_at="the power limit in force against the GPU's default",
            cure="`nvidia-smi -i N -pl DEFAULT`, or find who set it: this GPU is slower than its peers",
            source="NVML enforced and default power limit",
            unit="W",
        ),
        Rule(
            check="memory_held",
            looks_at="GPU memory held by processes that are not this job's",
            cure="end those processes (often left over from an earlier job), or choose another GPU",
            source="NVIDIA's resiliency extension waits for less than 512 MB before it restarts",
            limit=512,
            unit="MiB",
            must=True,
        ),
        Rule(
            check="pcie_width",
            looks_at="the PCIe link's width against the widest that GPU and slot can",
            cure="reseat the GPU or its riser, reboot; leave the node out until it is wide again",
            source="NVML maximum link width",
            unit="lanes",
        ),
        Rule(
            check="pcie_generation",
            looks_at="the PCIe link's generation under load against the highest that GPU and slot can",
            cure="check the slot's setting in the BIOS, reseat the GPU, reboot",
            source="NVML maximum link generation",
        ),
        Rule(
            check="pcie_replays",
            looks_at="PCIe packets that had to be sent again",
            cure="reseat the GPU or its riser; leave the node out if it stays",
            source="DCGM limit, 8 a minute",
            unit="replays",
            growth_per_minute=8,
        ),
        Rule(
            check="nvlink_down",
            looks_at="NVLinks that are down while others of the same GPU are up",
            cure=f"{_RESET}; restart the fabric manager; leave the node out until all are up",
            source="NVIDIA health validation, nvlink_active",
            limit=1,
            unit="links",
            must=True,
        ),
        Rule(
            check="nvlink_recoveries",
            looks_at="NVLinks that had to be trained again",
            cure=f"{_RESET}; hand the node in if it comes back (Xid 74, 144 to 150 in the kernel log)",
            source="DCGM limit of NVLink errors, 1",
            limit=1,
            unit="recoveries",
            growth_per_minute=0,
        ),
        Rule(
            check="nvlink_crc",
            looks_at="NVLink CRC errors; only a high rate matters",
            cure=f"{_RESET}; hand the node in if it comes back",
            source="DCGM limit of NVLink CRC errors, 100 a second",
            unit="errors",
            growth_per_minute=6000,
        ),
        Rule(
            check="nvlink_replays",
            looks_at="NVLink packets that had to be sent again",
            cure=f"{_RESET}; hand the node in if it comes back",
            source="as NVLink CRC errors, of which each causes one",
            unit="replays",
            growth_per_minute=6000,
        ),
        Rule(
            check="fabric",
            looks_at="the GPU has joined the NVSwitch fabric",
            cure="start the fabric manager (`systemctl restart nvidia-fabricmanager`), of the driver's very version",
            source="NVML fabric state; CUDA error 802",
            must=True,
        ),
        Rule(
            check="xid",
            looks_at="Xid events that arrive while the probe listens; older ones stand in the kernel log",
            cure="leave the node out where the Xid is the hardware's; look at the job's first error where it is not",
            source="Xid catalogue; the cause table of this SDK",
            must=True,
        ),
    )
}


def found(check: str, subject: str, status: Status, **what: Any) -> Finding:
    """Return the finding of a check; its unit, limit, cure and `must` are the rule's unless `what` has others."""
    rule = RULES[check]
    cure = _for_gpu(what.pop("cure", rule.cure), subject)
    data = dict(what.pop("data", {}))
    if data.get("works") is False:
        data["lost"] = cure
    if rule.growth_per_minute is not None and isinstance(what.get("value"), int):
        data["growth"] = {"per_minute": rule.growth_per_minute, "cure": cure}
    return Finding(
        probe=PROBE,
        check=check,
        subject=subject,
        status=status,
        unit=rule.unit,
        threshold=what.pop("threshold", rule.limit),
        cure=cure if status in (Status.DEGRADED, Status.FAILED) else "",
        must=rule.must,
        data=data,
        **what,
    )


def _for_gpu(cure: str, subject: str) -> str:
    """Write the GPU's number into the commands of a cure, so that they can be copied."""
    number = subject.removeprefix("GPU ")
    return cure.replace(" -i N", f" -i {number}") if number.isdigit() else cure
