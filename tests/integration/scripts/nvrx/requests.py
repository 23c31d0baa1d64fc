"""A rank of NVRx that asks its launcher for something, as REQUEST says, and fails."""

import os

from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient, WorkloadAction, WorkloadControlRequest

client = RankMonitorClient()
client.init_workload_monitoring()
client.send_heartbeat()
request = WorkloadControlRequest(WorkloadAction[os.environ["REQUEST"]], "the data is bad; token=abcdefgh12345678")
client.send_workload_control_request(request)
raise SystemExit(int(os.environ["EXIT"]))
