"""A rank with children of both kinds that a training script has: forked workers and a program."""

import multiprocessing
import os
import subprocess
import time

if __name__ == "__main__":
    subprocess.Popen(["sleep", "1000"])
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,)).start()
    with open(os.path.join(os.environ["PROBE_OUT"], os.environ["RANK"] + ".up"), "w"):
        pass
    time.sleep(1000)
