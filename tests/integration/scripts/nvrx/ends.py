"""Ends of NVRx's client that are no fault, however long they take: WHEN before any heartbeat, or after the shutdown."""

import os
import sys
import time

from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

client = RankMonitorClient()
client.init_workload_monitoring()
if os.environ["WHEN"] == "before":
    sys.exit(0)
client.send_heartbeat()
client.send_heartbeat()
client.shutdown_workload_monitoring()
client.shutdown_workload_monitoring()
time.sleep(2 * client.hb_timeouts.subsequent + 1)
