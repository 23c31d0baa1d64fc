"""NVIDIA's resiliency extension (NVRx): its client and its straggler detector, on top of the SDK.

    from resilience_sdk.adapters.nvrx.client import RankMonitorClient

is what a script finds as `nvidia_resiliency_ext.fault_tolerance` under `resilience run --provide-nvrx`. `client` maps
heartbeats and sections onto those of the SDK, `timeouts` is the arithmetic of calculated ones, `detector` the scores
of `straggler.Detector`. `provided` is the directory that is put on the path of ranks; nobody imports it from here.
"""
