"""What is no fault of NVRx's client, however long it takes: WHEN late in a script, around heartbeats, or at an end."""

import os
import sys
import time

from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

if os.environ["WHEN"] == "late":
    time.sleep(5)
assert os.environ["FT_RANK_MONITOR_IPC_SOCKET"], "by which scripts know that there is a monitor"
client = RankMonitorClient()
client.init_workload_monitoring()
if os.environ["WHEN"] == "before":
    sys.exit(0)
if os.environ["WHEN"] == "around":
    client.start_section("training")
    for _ in range(20):
        time.sleep(0.2)
        client.send_heartbeat()
    client.end_section("training")
client.send_heartbeat()
client.send_heartbeat()
client.shutdown_workload_monitoring()
client.shutdown_workload_monitoring()
time.sleep(2 * client.hb_timeouts.subsequent + 1)
