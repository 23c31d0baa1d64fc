"""Recorder: what a rank is doing, in shared memory, readable while the rank hangs and after it has died.

In come the starts and ends of timed blocks, on the thread that trains; out comes a rank page of fixed layout, which the
monitor maps. `page_layout` decides where each word is, `page_writer` is the rank's side, `page_reader` the
monitor's, `page_directory` the private directory in memory that holds the pages of a job. `blocks` are the context
managers under `heartbeat()` and `straggler.section()`, `recorder` decides which thread writes where, `lookup` finds the
block of a name and starts the recording at its first use. In a step nothing here allocates, locks or calls the system.
"""
