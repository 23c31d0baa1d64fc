"""A script that says its secrets wherever programs say them: another way to fail in each attempt."""

import json
import os
import sys
import threading
import time
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record

from resilience_sdk import heartbeat, preemption, straggler

ATTEMPT = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
SECRETS = json.loads(Path(os.environ["PLANTED"]).read_text())


def ask_for_data():
    """Fail as clients do that show what they sent."""
    user, signature, bearer = SECRETS["user"], SECRETS["signature"], SECRETS["bearer"]
    asked = f"https://me:{user}@host.example/data?part=1&sig={signature}"
    raise ConnectionError(f"GET {asked} failed, headers were {{'Authorization': 'Bearer {bearer}', 'Accept': '*/*'}}")


def log_in(why):
    """Fail with the values of variables, one of which nobody else knows."""
    os.environ["LATE_API_KEY"] = SECRETS["late"]
    service, late = os.environ["SERVICE_SECRET"], os.environ["LATE_API_KEY"]
    raise RuntimeError(
        f"{service} and {late} were refused; token={SECRETS['token']}, 'Password': '{SECRETS['said']}' ({why})"
    )


def in_a_thread():
    """Fail in a thread, after which the rank gives up."""
    raise RuntimeError(f"X-Api-Key: {SECRETS['header']} was refused")


@record
def main():
    """Beat once, and fail."""
    with heartbeat():
        pass
    if ATTEMPT == 0:
        try:
            ask_for_data()
        except ConnectionError as error:
            log_in(error)
    if ATTEMPT == 1:
        thread = threading.Thread(target=in_a_thread)
        thread.start()
        thread.join()
        os._exit(1)
    if ATTEMPT == 2:
        said = f"HF_TOKEN={SECRETS['printed']} was refused at /x?access_token={SECRETS['query']}"
        print(f"Traceback (most recent call last):\nRuntimeError: {said}", file=sys.stderr, flush=True)
        os._exit(1)
    threading.Thread(target=time.sleep, args=(1000,), name=f"password={SECRETS['thread']}", daemon=True).start()
    while not preemption.check():
        with heartbeat(f"api_key={SECRETS['beat']}"), straggler.section(f"part of token={SECRETS['section']}"):
            time.sleep(0.01)


main()
