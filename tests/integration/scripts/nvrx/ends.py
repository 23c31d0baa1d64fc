"""What is no fault of NVRx's client, however long it takes: WHEN late in a script, before any heartbeat, or after."""

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
client.send_heartbeat()
client.send_heartbeat()
client.shutdown_workload_monitoring()
client.shutdown_workload_monitoring()
time.sleep(2 * client.hb_timeouts.subsequent + 1)
