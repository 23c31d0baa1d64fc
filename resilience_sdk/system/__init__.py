"""System: what the kernel and this installation say, read without a dependency and without an exception.

`procfs` reads /proc, /sys and control groups; `hostinfo` names the host, its boot and its processes; `linux` holds the
calls that Python has no name for; `file_lock` is the advisory lock between processes; `installation` knows where the
package lies; `programs` is the table of the processes of our own, and how they are started.
"""
