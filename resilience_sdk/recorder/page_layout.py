"""The layout of a rank page, version 1: the place of each word, and names that stay different in a given room.

A page is a file of 64 KiB in a tmpfs, mapped by its rank (the writer) and by the node's monitor (the reader).
It is an array of native, aligned 64-bit words, because a store of one such word cannot be seen torn:

    header    identity and state that changes rarely
    text      JSON with what is not a number (host, script), fixed at creation, and the reason of a pause
    names     the table of section names: kind, explicit timeout, UTF-8 name
    lanes     one per thread: its id, the step that it published, the last pass of a heartbeat that no ring tells, and
              which of its pulses are none of the loop's steps
    rings     one per (lane, name): when it was entered and left last, how often, and its last 64 durations; or the
              last 64 amounts of work that were told
    before    one word per ring: how many of its passes came before the first step was complete

Every word has one writer: a lane's thread, or for the tables and the header the thread that holds the
recorder's lock or the page's own. Words that belong together and change rarely are bracketed by SEQUENCE (odd
while changing).
The stack of open blocks is not kept: it is the open blocks of a lane by their time of entry. A reader that
comes in the middle of a store sees a block closed a moment too early or open a moment too long; both only
delay a verdict by one poll.
"""

from __future__ import annotations

import zlib

MAGIC = 0x5245_5349_4C49_4531  # "RESILIE1"
VERSION = 1
PAGE_BYTES = 64 * 1024
PAGE_WORDS = PAGE_BYTES // 8

# header
W_MAGIC = 0
W_VERSION = 1
W_SEQUENCE = 2
W_PID = 3
W_START_TICKS = 4
W_RANK = 5
W_LOCAL_RANK = 6
W_WORLD_SIZE = 7
W_ATTEMPT = 8
W_CREATED_NS = 9
W_FLAGS = 10
W_EXIT_STATE = 11
W_BEAT_SOURCE = 12
W_CHECKS = 13
W_NAMES = 14  # used entries of the name table
W_RINGS = 15  # used rings
W_LANES = 16  # used lanes
W_ODD_EXITS = 17  # sections closed out of order (coroutines): closed, but not sampled
W_LOST = 18  # sections that found no lane, name or ring: guarded by nothing, counted here
W_FIRST_BEAT_NS = 19
W_COLLECTIVES = 20  # collectives completed, from the flight recorder, where somebody asked for it
W_PAUSED = 21  # depth of heartbeat.paused()
W_RESUMED_NS = 22  # when the last pause ended: what was open before then has had its time suspended
W_NOTICE = 23  # why this rank knows that the job should leave: a signal's number or one of NOTICE_NAMES; 0: none
W_ACKNOWLEDGED = 24  # the round whose stop this rank has promised to take part in
W_OVER_NS = 30  # when the script ended and the interpreter began to go down, by whatever; 0: it has not
W_DESTROYING_NS = 31  # since when the main thread has been in torch's destroy_process_group; 0: it is not
W_HEARS = 32  # bit n: signal n is taken by the handler of the SDK in this process, as a request to leave
W_DEVICE_NOW = 33  # bytes that torch's allocator has handed out on the rank's device
W_DEVICE_PEAK = 34  # the most of it
W_DEVICE_TOTAL = 35  # bytes that the device has; 0: the rank uses none, or nobody has looked
W_STEPPED = 29  # 1: the first step is complete, and the words BEFORE say what came before its end
W_EXIT_CODE = 28  # what the script has left with, where it is over or EXIT_STATE clean; how its process ends may differ
W_JOINT = 27  # bit n: passes of name n hold collectives, so their time is that of the other ranks too
# These two have the node's monitor as their writer.
W_CONTROL = 25  # round << 48 | number of the check at which all stop; 0: nothing is proposed, see `preemption`
W_DEADLINE_NS = 26  # when the time to leave is over (monotonic); 0: nobody has asked

FLAG_PROVISIONAL = 1  # the rank is a guess until the process group is up
FLAG_DECLARED = 2  # user code uses the SDK, so a first beat is to be expected
FLAG_DONE = 4  # heartbeat.done(): no more deadlines
FLAG_DUMPS = 8  # the stack-dump handler is installed
FLAG_GROUP_LEFT = 32  # torch's process group was still there when the script had ended: nobody has destroyed it
FLAG_KEEPS_TIMEOUTS = 64  # the program wants none to be learned: `calculate_timeouts=False`
FLAG_NVRX_WORDS = 128  # the program is written for NVRx: the lines that its users search for stand beside ours
FLAG_TRAINS = 16  # an optimizer of torch was made here: a training, whether its code uses the SDK or not

# Beyond all numbers of signals.
NOTICE_REQUEST, NOTICE_END, NOTICE_FILE = 1000, 1001, 1002
NOTICE_NAMES = {NOTICE_REQUEST: "preemption.request()", NOTICE_END: "the scheduler's end time", NOTICE_FILE: "preempt"}

EXIT_RUNNING, EXIT_CLEAN, EXIT_ERROR = 0, 1, 2
EXIT_NAMES = ("running", "clean", "error")
BEATS_NONE, BEATS_USER, BEATS_OPTIMIZER, BEATS_COLLECTIVES = 0, 1, 2, 3
BEAT_SOURCES = ("none", "user", "optimizer", "collectives")
COLLECTIVES_EVERY_S = 2.0  # how often a rank that gives no other sign looks for completed collectives

# text
TEXT_AT = 64 * 8  # bytes
TEXT_BYTES = 512
PAUSE_TEXT_AT = TEXT_AT + TEXT_BYTES
PAUSE_TEXT_BYTES = 128

# names
NAMES_AT = 160
NAME_WORDS = 8
NAME_SLOTS = 64
N_KIND = 0
N_TIMEOUT_NS = 1  # 0: no timeout by argument, else the timeout
N_TEXT = 2
NAME_BYTES = (NAME_WORDS - N_TEXT) * 8
KINDS = ("heartbeat", "compute", "comm", "io", "idle", "pulse", "gpu", "gpu_comm", "work")
# Kind of a section -> that of its time on the device, a row of the same name: never open, has no deadline. Waiting is
# waiting there too: the fastest rank does it longest.
DEVICE_KINDS = {"compute": "gpu", "io": "gpu", "comm": "gpu_comm"}
WORK = "work"  # amounts in place of durations, as doubles: rows that are never open either
BEAT_KINDS = ("heartbeat", "pulse")
EVALUATION = "eval_batch"  # a heartbeat that is progress and no step: batches of an evaluation, between two steps
NEXT_STEPS = "data"  # between two counted steps it belongs to the one that comes, all else to the one that was

# lanes
LANES_AT = NAMES_AT + NAME_WORDS * NAME_SLOTS
LANE_WORDS = 8
LANE_SLOTS = 8
L_THREAD = 0
L_STEP = 1  # global step + 1; 0: nobody gave one, the ring of the heartbeat counts
# Of the last heartbeat whose pass the ring does not tell, since it was not counted or not as long as it lasted.
# The last pass of the heartbeat that hooks begin, of which a lane has one: its ring may tell another duration.
L_PASS_ENTERED_NS = 2
L_PASS_LEFT_NS = 3
L_RAISED_NS = 5  # when the last step was left by an exception, as R_LEFT_NS of its heartbeat has it; or:
RAISED_INSIDE = (1 << 64) - 1  # the step is open, and the process ends by an exception that came in it
L_PULSES_BEFORE = 4  # pulses that were made for a script which then began to beat by itself: none of its steps

# rings
RINGS_AT = LANES_AT + LANE_WORDS * LANE_SLOTS
RING_WORDS = 68
RING_SLOTS = 100
R_NAME_LANE = 0  # (name id) | lane << 32
R_ENTERED_NS = 1  # when the block was entered last
R_LEFT_NS = 2  # when it was left last; it is open while ENTERED is after that
R_COUNT = 3  # completed passes
R_SAMPLES = 4
RING_SAMPLES = 64
RING_MASK = RING_SAMPLES - 1

# before
BEFORE_AT = RINGS_AT + RING_WORDS * RING_SLOTS

# One ring more than is handed out, at the very end: for those who found none.
assert BEFORE_AT + RING_SLOTS + RING_WORDS <= PAGE_WORDS
assert PAUSE_TEXT_AT + PAUSE_TEXT_BYTES <= NAMES_AT * 8


def name_at(index: int) -> int:
    """Return the first word of name `index`."""
    return NAMES_AT + NAME_WORDS * index


def lane_at(index: int) -> int:
    """Return the first word of lane `index`."""
    return LANES_AT + LANE_WORDS * index


def ring_at(index: int) -> int:
    """Return the first word of ring `index`."""
    return RINGS_AT + RING_WORDS * index


def shortened(name: str, most_bytes: int) -> str:
    """Return `name` in at most so many bytes of UTF-8: of a longer one the beginning, and a sum over the whole of it.

    The sum is the same in every process, so that ranks agree. The beginning alone is often common: a path, a template.
    """
    data = name.encode(errors="replace")
    if len(data) <= most_bytes:
        return name
    end = f"~{zlib.crc32(data):08x}"
    return data[: most_bytes - len(end)].decode(errors="ignore") + end
