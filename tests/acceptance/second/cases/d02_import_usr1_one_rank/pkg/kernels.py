"""Builds its extensions when it is imported, as some do."""
import time

import told

told.tell("importing")
end = time.monotonic() + told.pace("import", 10)
while time.monotonic() < end:
    sum(range(20000))
    time.sleep(0.02)
told.tell("imported")
